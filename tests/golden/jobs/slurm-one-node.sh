#!/bin/bash
# Written by outsize 0: outsize emit ENGINE train.py
# LlamaForCausalLM, batch 32, on nodes of 8xh100-80gb
#
# nodes  devices    step  samples/s   fullest device, P95  layout
#     1        8  9.00 s       3.56  39.0 GiB of 79.0 GiB  pp 8, 1f1b, 32 microbatches, bits of one device
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.out

set -u

# Slurm gives a number of nodes of the range; the most of them that have a plan are used.
nodes=0
for planned in 1; do
    if [ "$planned" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$planned; fi
done
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export nodes address
export OUTSIZE_WORLD_SIZES=8  # the numbers of ranks that have a plan

srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c '
    meeting=
    if [ "$nodes" -gt 1 ]; then
        meeting="--nnodes=$nodes --node-rank=$SLURM_NODEID --master-addr=$address --master-port=29500"
    fi
    exec outsize run --nproc-per-node=8 --max-restarts=3 --shutdown-timeout=108 $meeting train.py --text '"'"'it'"'"'"'"'"'"'"'"'s a test'"'"'
'
code=$?

# A signal has asked the run to end: it is saved (75), or had not begun (138). It is queued again.
case $code in 75|138) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
