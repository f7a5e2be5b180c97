# JupyterLab with Spark and the broker's package, for compose.yaml. Java comes from PyPI.
ARG PYTHON=3.13-slim-bookworm
FROM python:${PYTHON}
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY topic_matcher topic_matcher
COPY sessions sessions
COPY bridge_spark bridge_spark
COPY mqttbroker mqttbroker
# The versions are those that pyproject.toml allows.
# hadolint ignore=DL3013
RUN MQTTBROKER_COMPILE=0 pip install --no-cache-dir '.[spark,jdk,demo,notebook]' 'jupyterlab>=4.4,<5' \
    && useradd --uid 1000 --create-home --home-dir /notebook notebook
USER 1000
WORKDIR /notebook/work
EXPOSE 8888
CMD ["sh", "-c", "exec jupyter lab --ip 0.0.0.0 --no-browser --IdentityProvider.token=\"$(cat \"$BROKER_TOKEN_FILE\")\" sensors.ipynb"]
