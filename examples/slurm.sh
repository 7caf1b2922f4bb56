#!/usr/bin/env bash
# ResNet-18 on two nodes with four GPUs each: one torchrun per node, which starts the ranks.
#
#   sbatch examples/slurm.sh --batch 64 --image 224
#
# The cache of measurements may lie in a folder that all nodes share, or on each node's own disk.
#SBATCH --job-name=ucudnn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
set -euo pipefail

export UCUDNN_CACHE="${UCUDNN_CACHE:-$SLURM_SUBMIT_DIR/ucudnn-cache}"
# Where ranks run on processors each needs as many cores as it has threads.
ranks="${SLURM_GPUS_ON_NODE:-${RANKS_PER_NODE:-2}}"
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks))
# Else a restart finds the addresses of dead ranks in the store (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="$ranks" \
    --max-restarts=2 \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head_node:29500" \
    "$SLURM_SUBMIT_DIR/examples/ddp_resnet.py" "$@"
