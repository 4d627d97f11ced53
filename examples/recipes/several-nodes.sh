#!/usr/bin/env bash
# One run on two machines: this script on each, with its number. The machines must see the same output.dir.
#
#   NODE_RANK=0 bash examples/recipes/several-nodes.sh gpu01:29400 [RUN.yaml] [key=value ...]    # on gpu01
#   NODE_RANK=1 bash examples/recipes/several-nodes.sh gpu01:29400 [RUN.yaml] [key=value ...]    # on gpu02
#
# Under SLURM, Kubernetes or SkyPilot `manyhands submit RUN.yaml --to ...` writes the job (docs/clusters.md).
set -euo pipefail
exec manyhands train "${2:-examples/recipes/full-fsdp.yaml}" --nodes 2 --node-rank "${NODE_RANK:?}" --rendezvous "${1:?}" \
    "${@:3}"
