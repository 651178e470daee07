# What the other scripts share: everything is in the folder FOLDER, and the SuperLink listens at PORT of this machine.
set -eu
umask 077  # the messages in state.db, keys and models are for this account only
FOLDER=${FOLDER:-$PWD/federation}
PORT=${PORT:-9092}
HERE=$(cd "$(dirname "$0")" && pwd)
export FLWR_HOME="$FOLDER/flwr"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export OMP_NUM_THREADS=1
mkdir -p "$FLWR_HOME"
