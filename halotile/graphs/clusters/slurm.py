"""A Slurm job for each worker."""

from halotile.graphs.clusters.launches.batch_system import BatchSystem, JobRows

_WAITS = "PENDING|CONFIGURING|RUNNING|REQUEUED|REQUEUE_FED|SUSPENDED|STAGE_OUT|COMPLETING|RESIZING|SIGNALING"

SYSTEM = BatchSystem(
    title="Slurm",
    module="slurm",
    cluster="SLURMCluster",
    submits="sbatch",
    cancels="scancel",
    requeues="scontrol requeue",
    states=JobRows(
        "squeue --noheader --states=all --format='%A %T (%r)' --jobs={}",
        "^{} ",
        rf"(?!(?:{_WAITS})\b)(.*)",
        between=",",
        shown="(.*)",
    ),
    stays=("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "STOPPED"),
    gpus=lambda choice, _: {"directives": [f"--gres=gpu:{choice.gpus}"]},
    lists="`sinfo` lists its queues",
    driver=(),
)
