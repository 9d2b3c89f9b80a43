torchrun --nproc_per_node 2 train.py --model_name_or_path gpt2 --per_device_train_batch_size $(nproc)
