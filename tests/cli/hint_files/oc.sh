torchrun --nproc_per_node 8 src/scripts/train/sft/Olmo-2-7B-SFT.py launch run checkpoint ai2/jupiter --seq_len 4096 --global_batch_size 4097
