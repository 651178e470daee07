#!/bin/sh
# The run: waits for 30 wards, agrees on the columns, finds groups and models, and writes the page.
. "$(dirname "$0")/settings.sh"
[ -d "$FOLDER/app" ] || coterie federate write-app --out "$FOLDER/app"
flwr run "$FOLDER/app" hospitals --stream --run-config "n-users=30 wait=300.0 out='$FOLDER/run'"
