# drivetrain with everything that requirements.lock names, for a node with NVIDIA GPUs: `docker build -t drivetrain .`
# CUDA, cuDNN and NCCL come with torch's own packages; the node brings the driver and the container toolkit.
FROM python:3.12-slim-bookworm

# rdma-core and ibverbs-providers: NCCL speaks InfiniBand and RoCE through them. libosmesa6, libegl1: simulators draw offscreen.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ffmpeg git ibverbs-providers libegl1 libgl1 libibverbs1 libosmesa6 openssh-client rdma-core \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/drivetrain
RUN pip install --no-cache-dir 'uv>=0.8,<1'
COPY requirements.lock ./
RUN uv pip install --system --no-cache --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN uv pip install --system --no-cache --no-deps .

ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["drivetrain"]
CMD ["--help"]
