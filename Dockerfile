# One image for every role: `docker run … magnetar standalone|metadata|bookie|broker`.
# Everything that is installed is named, with its hash, in requirements.lock, and what compiles the hot paths (setup.py) in
# requirements-build.lock (`make lock` renews both). The first stage is the larger image because that has a C compiler.
FROM python:3.13 AS build
WORKDIR /src
COPY requirements.lock requirements-build.lock ./
RUN pip wheel --no-cache-dir --require-hashes --no-deps --wheel-dir /wheels -r requirements.lock \
    && pip install --no-cache-dir --require-hashes --no-deps -r requirements-build.lock
COPY . .
RUN MAGNETAR_COMPILE=1 pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl && rm -rf /wheels \
    && useradd --system --create-home --uid 10001 magnetar \
    && install -d -o magnetar -g magnetar /data \
    && install -d -m 700 -o magnetar -g magnetar /security /authority
USER magnetar
WORKDIR /data
VOLUME /data
EXPOSE 7650 6650 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["magnetar"]
# It serves its own container alone. For other machines: --host 0.0.0.0 and --security FILE (docs/security.md).
CMD ["standalone", "--data", "/data"]
