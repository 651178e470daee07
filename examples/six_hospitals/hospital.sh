#!/bin/sh
# One hospital: a SuperNode with the hospital's own table, its own key, and a folder for its wards' models.
#     ./hospital.sh NUMBER NAME
. "$(dirname "$0")/settings.sh"
cat > "$FOLDER/$2.toml" <<END
data = "csv"
path = "$FOLDER/tables/$2.csv"
user = "ward"
target = "days"
models-dir = "$FOLDER/models/$2"
ledger-dir = "$FOLDER/ledgers/$2"
consent = "hessians" # second moments of the eight patients of a ward who are held out may leave
END
exec flower-supernode --superlink "127.0.0.1:$PORT" --port "$((PORT + 1 + $1))" --node-config "$FOLDER/$2.toml" \
    --root-certificates "$FOLDER/keys/ca.crt" --auth-supernode-private-key "$FOLDER/keys/node-$1"
