"""The keys of a run file that ``manyhands submit`` reads: what a cluster is asked for. Nothing else reads them.

Part of the schema (``schema.py``), under its rules: no torch, no file, no side effect; every key has a description.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from manyhands.config.data_schema import Auto, PositiveInt, Section

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\n\r]*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Duration = Annotated[str, Field(pattern=r"^((\d+-)?\d{1,3}:\d\d:\d\d|\d+d(\d+h)?(\d+m)?|\d+h(\d+m)?|\d+m)$")]


class SubmitSection(Section):
    """What `manyhands submit` asks of a cluster; no other command reads it."""

    gpus: Text | None = Field(
        None, description="GPUs to ask for, as --gpus takes them: 8xH100, 2x8xH100-80GB (2 machines with 8 each)."
    )
    gpu_type: Text | None = Field(
        None,
        description="What the cluster calls these GPUs: SLURM's GRES type, the node label nvidia.com/gpu.product, "
        "SkyPilot's accelerator; null: derived from the kind (SLURM: also from sinfo).",
    )
    time_limit: PositiveInt | Duration | None = Field(
        None, description="Longest time a job may take: 24:00:00, 2-00:00:00, 36h, 90m, or seconds; null: no limit."
    )
    save_before_s: PositiveInt | Auto = Field(
        "auto",
        description="SLURM: seconds before the time limit at which the run saves, ends and is queued again; auto: 120 "
        "and the time that a checkpoint takes at 0.5 GB/s.",
    )
    cpus_per_gpu: PositiveInt | Auto = Field(
        "auto", description="CPU cores for each process; auto: 8, or fewer where machines of this class have fewer."
    )
    partition: Text | None = Field(None, description="SLURM: partition.")
    account: Text | None = Field(None, description="SLURM: account to charge.")
    options: tuple[Text, ...] = Field(
        (), description="Further options: of sbatch (written as #SBATCH lines), `kubectl create`, `sky jobs launch`."
    )
    namespace: Text | None = Field(None, description="Kubernetes: namespace; null is that of kubectl's context.")
    runtime: Text = Field("torch-distributed", description="Kubernetes: the ClusterTrainingRuntime of the TrainJob.")
    image: Text | None = Field(
        None,
        description="Container image in which manyhands is installed. SLURM: through srun's --container-image (pyxis).",
    )
    volumes: dict[str, Text] = Field(
        {},
        description="Disks that outlive the job, by the path at which they are mounted: a PersistentVolumeClaim, "
        "a SkyPilot volume or bucket (s3://...), a folder of the node (SLURM with an image).",
    )
    python: Text | None = Field(
        None,
        description="Python that has manyhands; null: this one with SLURM (a shared disk), python3 in an image or on a "
        "rented machine, or where setup may choose one.",
    )
    setup: tuple[str, ...] = Field((), description="Shell commands before the run, such as `module load cuda`.")
    environment: dict[Name, str] = Field({}, description="Environment variables of the job; none that are secret.")
    secrets: dict[Name, Text] = Field(
        {},
        description="Secret environment variables and, for Kubernetes, the Secret that has each under this name: "
        "{HF_TOKEN: my-secret}. sbatch and sky take their values from this shell.",
    )
