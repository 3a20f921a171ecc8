# docker build -t jtrain --build-arg EXTRA=cuda12 .      (tpu, cuda12, cuda13; empty for the CPU)
# docker run --gpus all -v "$PWD/runs:/home/jtrain/runs" jtrain train demo
FROM python:3.12-slim

ARG EXTRA=""
WORKDIR /src
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY jtrain jtrain
COPY configs configs
# Exactly the versions of the lock file, each file checked against its hash.
RUN pip install --no-cache-dir uv \
 && uv export --frozen --no-emit-project --format requirements.txt ${EXTRA:+--extra "$EXTRA"} > /tmp/requirements.txt \
 && pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt \
 && pip install --no-cache-dir --no-deps . \
 && rm -r /tmp/requirements.txt /src/* \
 && useradd --create-home --uid 1000 jtrain

USER jtrain
WORKDIR /home/jtrain
ENTRYPOINT ["jtrain"]
