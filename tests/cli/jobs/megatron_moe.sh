# A mixture of experts on two nodes: interleaved pipeline, experts over two ranks, a distributed optimizer.
TP=${TP:-4}
PP=2
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 \
  --micro-batch-size 1 --global-batch-size 128 --bf16 --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP --sequence-parallel --use-distributed-optimizer --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
