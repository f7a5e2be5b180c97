# The notebook of compose.yaml: Jupyter, Spark with its Java, and this package, as an unprivileged user.

# The Python of the Dockerfile.
ARG PYTHON=3.13.15-slim-bookworm@sha256:ed86c82274b3c69b52fb5820f358f0bd7df0b603332063cb5c6e32bd220c3e6e

FROM python:${PYTHON} AS build
WORKDIR /src
COPY requirements requirements
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.txt \
    && pip wheel --no-cache-dir --require-hashes --no-build-isolation --requirement requirements/notebook.txt --wheel-dir /wheels
COPY pyproject.toml setup.py README.md LICENSE ./
COPY topic_matcher topic_matcher
COPY sessions sessions
COPY bridge_spark bridge_spark
COPY mqttbroker mqttbroker
RUN MQTTBROKER_COMPILE=0 pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:${PYTHON}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && pip check \
    && useradd --uid 1000 --create-home notebook \
    && install -d -m 0755 -o 1000 -g 1000 /notebooks
COPY --chown=1000:1000 docs/notebooks /notebooks
COPY docs/examples/demo /examples/demo
ENV PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /notebooks
VOLUME /notebooks
EXPOSE 8888
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8888/api', timeout=5)"]
ENTRYPOINT ["jupyter"]
CMD ["lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--LabApp.default_url=/lab/tree/sensors.ipynb"]
