#!/bin/sh
# Creates a CA and a certificate for the webhook with openssl, and the Secret as a manifest, for a first try without
# cert-manager and without `gpuwarden certs`. Nothing renews them. NAMESPACE, SERVICE_NAME and CERT_DIR override the
# names below. The last output is the CA bundle for the webhook configurations.
set -eu
umask 077
NAMESPACE=${NAMESPACE:-gpu-scheduler-system}
SERVICE_NAME=${SERVICE_NAME:-gpu-scheduler-webhook}
CERT_DIR=${CERT_DIR:-./certs}
DAYS=365
host="$SERVICE_NAME.$NAMESPACE.svc"
# The subject, which clients do not verify, has room for 64 characters: the longest name that fits.
common=gpuwarden
for name in "$SERVICE_NAME" "$SERVICE_NAME.$NAMESPACE" "$host"; do
    [ ${#name} -gt 64 ] || common=$name
done
authority="$SERVICE_NAME CA"
[ ${#authority} -le 64 ] || authority="gpuwarden CA"

command -v openssl >/dev/null || { echo "openssl is needed, and is not here" >&2; exit 1; }
case "$NAMESPACE$SERVICE_NAME" in
    *[!a-z0-9-]*) echo "NAMESPACE and SERVICE_NAME are names of a namespace and of a Service" >&2; exit 1 ;;
esac
mkdir -p "$CERT_DIR"
cd "$CERT_DIR"
rm -f ca.key tls.key webhook-tls-secret.yaml # umask does not apply to existing files

cat >csr.conf <<EOF
[req]
prompt = no
distinguished_name = subject
req_extensions = leaf
[subject]
O = gpuwarden
CN = gpuwarden admission
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = serverAuth
subjectAltName = @names
[names]
DNS.1 = $SERVICE_NAME
DNS.2 = $SERVICE_NAME.$NAMESPACE
DNS.3 = $host
DNS.4 = $host.cluster.local
EOF

quietly() { # prints the output only after a failure
    said=$("$@" 2>&1) || { echo "$said" >&2; exit 1; }
}

quietly openssl req -x509 -newkey rsa:2048 -nodes -sha256 -days $DAYS -keyout ca.key -out ca.crt \
    -config csr.conf -extensions ca -subj "/O=gpuwarden/CN=$authority"
quietly openssl req -newkey rsa:2048 -nodes -sha256 -keyout tls.key -out server.csr \
    -config csr.conf -subj "/O=gpuwarden/CN=$common"
quietly openssl x509 -req -in server.csr -sha256 -days $DAYS -CA ca.crt -CAkey ca.key -CAcreateserial -CAserial ca.srl \
    -extfile csr.conf -extensions leaf -out tls.crt
rm -f server.csr

encoded() { openssl base64 -A -in "$1"; }
cat >webhook-tls-secret.yaml <<EOF
apiVersion: v1
kind: Secret
metadata:
  name: gpu-scheduler-webhook-tls
  namespace: $NAMESPACE
type: kubernetes.io/tls
data:
  tls.crt: $(encoded tls.crt)
  tls.key: $(encoded tls.key)
EOF

echo "In $CERT_DIR: ca.crt, ca.key, tls.crt, tls.key, webhook-tls-secret.yaml (kubectl apply -f it)." >&2
echo "The CA bundle for the webhook configurations:" >&2
encoded ca.crt
echo
