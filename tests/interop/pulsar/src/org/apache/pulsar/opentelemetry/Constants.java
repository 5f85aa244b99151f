package org.apache.pulsar.opentelemetry;

public interface Constants {
    String BROKER_INSTRUMENTATION_SCOPE_NAME = "org.apache.pulsar.broker";
}
