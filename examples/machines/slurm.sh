#!/bin/bash
#SBATCH --job-name=fnddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1  # one torchrun a node, which starts the ranks, and starts them again if one dies
#SBATCH --cpus-per-task=8
# With GPUs: #SBATCH --gpus-per-node=4, and RANKS_PER_NODE=4
#
# RANKS_PER_NODE=2 sbatch examples/machines/slurm.sh --folder SHARED
set -eu
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # which srun no longer takes over from sbatch

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # with every --max-restarts: else ranks read addresses of those that are gone
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${RANKS_PER_NODE:-2}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" \
    examples/machines/train.py "$@"
