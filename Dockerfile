# check=skip=InvalidDefaultArgInFrom
# The image: an interpreter, the locked dependencies, gpuwarden; no compiler, no package manager of ours, no root.
# PYTHON_IMAGE is a python:3.12-slim with its digest. `make docker-build` and the release find out today's digest and
# hand it in, and it stands in the provenance of a release: there is none here that would grow old, hence the first line.
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY requirements/run.lock requirements/run.lock
# Wheels only: nothing is compiled, and no setup.py runs.
RUN python -m venv /opt/gpuwarden \
    && /opt/gpuwarden/bin/python -m pip install --disable-pip-version-check --no-cache-dir --no-compile \
        --only-binary=:all: --require-hashes -r requirements/run.lock
COPY pyproject.toml LICENSE README.md ./
COPY webhook webhook
RUN /opt/gpuwarden/bin/python -m pip install --disable-pip-version-check --no-cache-dir --no-compile \
        --no-deps --no-build-isolation --no-index . \
    && /opt/gpuwarden/bin/python -m pip uninstall --disable-pip-version-check --yes hatchling editables pip \
    && /opt/gpuwarden/bin/python -m compileall -q /opt/gpuwarden/lib

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/gpuwarden /opt/gpuwarden
# A user of whom the system knows nothing has no home, and libraries that look for one would fail.
ENV HOME=/ \
    PATH=/opt/gpuwarden/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="gpuwarden" \
      org.opencontainers.image.licenses="Apache-2.0"
# By number, so that `runAsNonRoot` can see it.
USER 65532:65532
WORKDIR /
EXPOSE 8443 8444 8080
ENTRYPOINT ["gpuwarden"]
CMD ["serve"]
