#!/bin/bash
# A launch script in the form of Megatron-LM's examples: arrays, variables, continuation lines.
export CUDA_DEVICE_MAX_CONNECTIONS=32

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
MASTER_ADDR=localhost
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
N_DENSE_LAYERS=3
N_MOE_LAYERS=58

CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=$2 #<Specify path and file prefix>_text_document

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)

MODEL_ARGS=(
    --use-mcore-models
    --num-layers $((N_DENSE_LAYERS + N_MOE_LAYERS))   # three of them dense
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --kv-channels 128
    --max-position-embeddings 4096
    --position-embedding-type rope
    --make-vocab-size-divisible-by 3232
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --mtp-num-layers 1
    --vocab-size 129280
)

MOE_ARGS=(
    --num-experts 256
    --moe-layer-freq "([0]*${N_DENSE_LAYERS}+[1]*${N_MOE_LAYERS})"
    --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk 8
    --moe-router-group-topk 4
    --moe-router-num-groups 8
    --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-aux-loss-coeff 1e-4
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout "Et*3|(tt|)*29,m|L"
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --no-gradient-accumulation-fusion
)

TRAINING_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 256 \
    --seq-length 4096 \
    --lr 3e-4 \
    --bf16
"

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    "${PARALLEL_ARGS[@]}" \
    $TRAINING_ARGS \
    --data-path $DATA_PATH \
    --save "$CHECKPOINT_PATH" \
    --load $CHECKPOINT_PATH
