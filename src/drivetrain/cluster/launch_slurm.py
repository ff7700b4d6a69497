"""The sbatch script: one torchrun per node, told to save before the time is up, put back into the queue, resumed.

Checked against Slurm 22.05 and later. Every line that is not obvious says why it is there, in the script itself.
"""

from __future__ import annotations

import shlex
import sys

from drivetrain.cluster.launch import Job, Slurm, exports
from drivetrain.types import UsageError

REQUEUE_SECONDS = 30  # before the limit, the job goes back into the queue whether the run has stopped or not


def batch_script(job: Job, slurm: Slurm) -> str:
    """The text of a script for `sbatch`; its paths must be absolute and on storage that all nodes share."""
    if slurm.grace <= REQUEUE_SECONDS:
        raise UsageError(f"--slurm.grace is {slurm.grace}, and must be at least {REQUEUE_SECONDS + 1} seconds.")
    return "\n".join([*_directives(job, slurm), "", *_body(job, slurm), ""])


def _directives(job: Job, slurm: Slurm) -> list[str]:
    options = [
        ("job-name", job.name, ""),
        ("nodes", str(job.nodes), ""),
        ("ntasks-per-node", "1", "torchrun starts the node's processes"),
        ("gpus-per-node", str(job.gpus_per_node) if job.gpus_per_node else "", ""),
        ("cpus-per-task", str(job.cpus_per_node) if job.cpus_per_node else "", ""),
        ("exclusive", None, "a neighbour on one node would slow all nodes"),
        ("mem", "0", "all of the node's memory"),
        ("time", slurm.time_limit, ""),
        ("partition", slurm.partition, ""),
        ("account", slurm.account, ""),
        ("exclude", ",".join(slurm.exclude), "nodes found unfit"),
        *((name, value if given else None, "") for name, given, value in (o.partition("=") for o in slurm.options)),
        ("requeue", None, "after a preemption or the loss of a node"),
        ("open-mode", "append", "a requeued job goes on in the same file"),
        ("signal", f"B:USR1@{slurm.grace}", "tells this script, so many seconds before the time is up"),
        ("output", _quoted(f"{job.out}/logs/slurm-".replace("%", "%%") + "%j.out"), ""),
    ]
    lines = [f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}" for name, value, _ in options]
    pairs = [(line, why) for line, (_, value, why) in zip(lines, options, strict=True) if value != ""]
    return [
        "#!/bin/bash",
        *(f"{line:<48}  # {why}" if why else line for line, why in pairs),
        f"# {job.recipe} on {job.nodes} nodes with {job.gpus_per_node} GPUs each; submitted again, it goes on where it was.",
    ]


def _quoted(text: str) -> str:
    """As sbatch reads an option: blanks end it unless it is quoted."""
    if '"' in text or "\n" in text:
        raise UsageError(f"--out {text!r} has a quote or a line break, which sbatch cannot take. Give another --out.")
    return f'"{text}"' if " " in text else text


def _body(job: Job, slurm: Slurm) -> list[str]:
    arguments = shlex.join(job.train())
    return f"""\
set -u
logs={shlex.quote(str(job.out))}/logs/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$logs"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))  # of this job alone, below the ports that Linux gives to outgoing connections
export head port logs
{chr(10).join(exports(job, "$logs"))}

# On every node. SIGTERM is for the training processes, which save and stop: torchrun, told itself, would kill them
# after 30 seconds, saved or not. It is ignored here, and each training process sets its own handler.
# The head is named, not guessed from host names, and nodes are called what Slurm calls them.
node='
trap "" TERM
exec "$0" -m torch.distributed.run \\
    --nnodes="$SLURM_NNODES" --nproc-per-node={job.processes_per_node} --max-restarts={job.restarts} \\
    --signals_to_handle=SIGINT,SIGHUP,SIGQUIT \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-conf=is_host="$((SLURM_NODEID == 0))" \\
    --rdzv-id="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" --local-addr="$SLURMD_NODENAME" \\
    --log-dir="$logs/node-$SLURM_NODEID" --redirects=3 --tee=3 --local-ranks-filter=0 \\
    -m drivetrain "$@"'

stop() {{
    echo "time is nearly up: saving, then back into the queue"
    scancel --signal=TERM "$SLURM_JOB_ID"  # reaches all processes of all nodes, and not this script
    for ((s = 0; s < {slurm.grace - REQUEUE_SECONDS}; s++)); do
        kill -0 "$step" 2>/dev/null || break
        sleep 1
    done
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap stop USR1

# One task per node, with all its cores: by default it would be bound to one. If a node fails, all stop and the job ends.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --output="$logs/node-%n.out" \\
    bash -c "$node" {shlex.quote(sys.executable)} {arguments} </dev/null &
step=$!
wait "$step"
""".rstrip("\n").splitlines()
