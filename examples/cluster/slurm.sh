#!/bin/bash
# A run on the nodes of a SLURM job: a Ray head on the first, a Ray node on each other, the driver beside the head.
#
#   sbatch examples/cluster/slurm.sh my.toml [--resume]
#
# NOT RUN by us: we have no SLURM. What it relies on: the repository, its virtual environment and the run's directory
# lie on a file system that all nodes share; all nodes reach each other on the ports below.
#SBATCH --job-name=springtide
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG [more options of springtide train]}
shift
venv=${SPRINGTIDE_VENV:-$SLURM_SUBMIT_DIR/.venv}
cd "$SLURM_SUBMIT_DIR"
source "$venv/bin/activate"

# Who knows the token may run programs in the cluster as you.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$SLURM_SUBMIT_DIR/.ray-token-$SLURM_JOB_ID
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
export RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs that share a node must not meet
address=$head_ip:$port
store=$((1 << 28)) # no trajectory and no weight passes Ray's object store

start=(ray start --block --object-store-memory="$store" --num-cpus="$SLURM_CPUS_PER_TASK")
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    "${start[@]}" --head --port="$port" --node-ip-address="$head_ip" --include-dashboard=false &
head=$!
until ray status --address "$address" > /dev/null 2>&1; do
    kill -0 $head || exit 1 # its log says why it did not start
    sleep 2
done
if ((SLURM_NNODES > 1)); then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="${nodes[0]}" --overlap \
        "${start[@]}" --address="$address" &
fi

# The driver. SLURM's TERM, two minutes before the time limit, reaches it: it saves, and --resume goes on.
springtide train "$config" "$@" \
    --set runtime.kind=ray --set runtime.ray.address="$address" --set runtime.start_s=600 &
driver=$!
trap 'kill -TERM $driver' TERM
status=0
wait $driver || status=$?
if kill -0 $driver 2> /dev/null; then status=0; wait $driver || status=$?; fi # the first wait ended with the signal
exit $status
