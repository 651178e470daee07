#!/bin/sh
# The server: makes certificates and a key for every hospital, starts the SuperLink, and registers the keys.
. "$(dirname "$0")/settings.sh"
[ -d "$FOLDER/keys" ] || coterie federate keys --host 127.0.0.1 --nodes 6 --out "$FOLDER/keys"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "hospitals"

[superlink.hospitals]
address = "127.0.0.1:$PORT"
root-certificates = "$FOLDER/keys/ca.crt"
END
flower-superlink --host 127.0.0.1 --port "$PORT" --database "$FOLDER/state.db" \
    --disable-runtime-dependency-installation --enable-supernode-auth --ssl-ca-certfile "$FOLDER/keys/ca.crt" \
    --ssl-certfile "$FOLDER/keys/server.pem" --ssl-keyfile "$FOLDER/keys/server.key" &
trap 'kill $!' INT TERM
until flwr supernode list hospitals > /dev/null 2>&1; do sleep 1; done
for key in "$FOLDER"/keys/node-*.pub; do flwr supernode register "$key" hospitals || true; done
touch "$FOLDER/ready"
wait
