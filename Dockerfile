# The broker without Spark, compiled, as an unprivileged user; pyarrow is in it for the streams:
#   docker build -t mqttbroker . && docker run -p 1883:1883 mqttbroker
# The data is in the volume /data. -e MQTTBROKER_<KEY>__<KEY>=VALUE sets a key of conf/mqttbroker.toml. Clients connect
# from outside the container, so anonymous ones need -e MQTTBROKER_ALLOW_ANONYMOUS=true. HTTP serves the
# health check only, until -e MQTTBROKER_HTTP__HOST=0.0.0.0 and -e MQTTBROKER_HTTP__TOKEN=... open it.

# All packages are those of requirements/, checked by their hashes (`make lock`). The root file system may be read-only, no
# capability is needed, and the user may be any: one that is not 1883 needs the group 0, or a volume that it may write to.
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges -v mqttbroker:/data -p 1883:1883 ...

# Both stages have the same Python. The digests are those of the multi-platform indexes; the tags only say what they are.
ARG PYTHON_BUILD=3.13.15-bookworm@sha256:62eafe52c91cad83c2c74e630bfde917da8c253673e695665d454def84fc9a13
ARG PYTHON=3.13.15-slim-bookworm@sha256:ed86c82274b3c69b52fb5820f358f0bd7df0b603332063cb5c6e32bd220c3e6e

# This image has a C compiler.
FROM python:${PYTHON_BUILD} AS build
WORKDIR /src
COPY requirements requirements
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.txt \
    && pip wheel --no-cache-dir --require-hashes --requirement requirements/image.txt --wheel-dir /wheels
COPY pyproject.toml setup.py README.md LICENSE ./
COPY topic_matcher topic_matcher
COPY sessions sessions
COPY bridge_spark bridge_spark
COPY mqttbroker mqttbroker
RUN MQTTBROKER_COMPILE=1 pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:${PYTHON}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && pip check \
    && useradd --uid 1883 --no-create-home --shell /usr/sbin/nologin mqttbroker \
    && install -d -m 0770 -o 1883 -g 0 /data
ENV MQTTBROKER_DATA_DIR=/data \
    MQTTBROKER_LISTENERS__0__HOST=0.0.0.0 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1883:1883
VOLUME /data
EXPOSE 1883 18083
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s CMD ["mqttbroker", "healthcheck", "--pid", "1"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["mqttbroker"]
CMD ["serve"]
