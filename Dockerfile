# One image for every role: `docker run … magnetar standalone|metadata|bookie|broker`.
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[security,patterns]'

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels \
    && useradd --system --create-home --uid 10001 magnetar \
    && install -d -o magnetar -g magnetar /data \
    && install -d -m 700 -o magnetar -g magnetar /security /authority
USER magnetar
WORKDIR /data
VOLUME /data
EXPOSE 7650 6650 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["magnetar"]
# A container's own network is closed; publish the port on this machine only: docker run -p 127.0.0.1:7650:7650 …
CMD ["standalone", "--host", "0.0.0.0", "--insecure", "--data", "/data"]
