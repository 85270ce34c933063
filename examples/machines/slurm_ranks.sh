#!/bin/bash
#SBATCH --job-name=fnddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2  # one task a rank
#SBATCH --cpus-per-task=4
# With GPUs: #SBATCH --gpus-per-node=2; all ranks of a node must see all of them
#
# sbatch examples/machines/slurm_ranks.sh --folder SHARED
set -eu
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # which srun no longer takes over from sbatch

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${PORT:-29500}" WORLD_SIZE="$SLURM_NTASKS"
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
    rank examples/machines/train.py "$@"
