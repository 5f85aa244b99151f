package org.apache.pulsar.opentelemetry;

import io.opentelemetry.api.common.AttributeKey;
import io.opentelemetry.api.common.Attributes;

/** The names that the broker uses, without a meaning: nothing is measured (OpenTelemetryService). */
public interface OpenTelemetryAttributes {
    AttributeKey<String> ML_CURSOR_NAME = AttributeKey.stringKey("ml_cursor_name");
    AttributeKey<String> ML_LEDGER_NAME = AttributeKey.stringKey("ml_ledger_name");
    AttributeKey<String> ML_NAME = AttributeKey.stringKey("ml_name");
    AttributeKey<Long> PULSAR_CONSUMER_ID = AttributeKey.longKey("pulsar_consumer_id");
    AttributeKey<String> PULSAR_CONSUMER_NAME = AttributeKey.stringKey("pulsar_consumer_name");
    AttributeKey<String> PULSAR_DOMAIN = AttributeKey.stringKey("pulsar_domain");
    AttributeKey<String> PULSAR_NAMESPACE = AttributeKey.stringKey("pulsar_namespace");
    AttributeKey<Long> PULSAR_PARTITION_INDEX = AttributeKey.longKey("pulsar_partition_index");
    AttributeKey<String> PULSAR_PRODUCER_ACCESS_MODE = AttributeKey.stringKey("pulsar_producer_access_mode");
    AttributeKey<Long> PULSAR_PRODUCER_ID = AttributeKey.longKey("pulsar_producer_id");
    AttributeKey<String> PULSAR_PRODUCER_NAME = AttributeKey.stringKey("pulsar_producer_name");
    AttributeKey<String> PULSAR_REPLICATION_REMOTE_CLUSTER_NAME = AttributeKey.stringKey("pulsar_replication_remote_cluster_name");
    AttributeKey<String> PULSAR_SUBSCRIPTION_NAME = AttributeKey.stringKey("pulsar_subscription_name");
    AttributeKey<String> PULSAR_SUBSCRIPTION_TYPE = AttributeKey.stringKey("pulsar_subscription_type");
    AttributeKey<String> PULSAR_TENANT = AttributeKey.stringKey("pulsar_tenant");
    AttributeKey<String> PULSAR_TOPIC = AttributeKey.stringKey("pulsar_topic");
    AttributeKey<Long> PULSAR_TRANSACTION_COORDINATOR_ID = AttributeKey.longKey("pulsar_transaction_coordinator_id");

    enum BacklogQuotaType {
        SIZE, TIME;

        public final Attributes attributes = Attributes.empty();
    }

    enum CacheEntryStatus {
        ACTIVE, EVICTED, INSERTED;

        public final Attributes attributes = Attributes.empty();
    }

    enum CacheOperationStatus {
        HIT, MISS;

        public final Attributes attributes = Attributes.empty();
    }

    enum CompactionStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum ConnectionCreateStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum ConnectionRateLimitOperationName {
        PAUSED, RESUMED, THROTTLED, UNTHROTTLED;

        public final Attributes attributes = Attributes.empty();
    }

    enum ConnectionStatus {
        ACTIVE, CLOSE, OPEN;

        public final Attributes attributes = Attributes.empty();
    }

    enum InflightReadLimiterUtilization {
        FREE, USED;

        public final Attributes attributes = Attributes.empty();
    }

    enum ManagedCursorOperationStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum ManagedLedgerOperationStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum PoolArenaType {
        HUGE, NORMAL, SMALL;

        public final Attributes attributes = Attributes.empty();
    }

    enum PoolChunkAllocationType {
        ALLOCATED, USED;

        public final Attributes attributes = Attributes.empty();
    }

    enum TransactionBufferClientOperationStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum TransactionPendingAckOperationStatus {
        FAILURE, SUCCESS;

        public final Attributes attributes = Attributes.empty();
    }

    enum TransactionStatus {
        ABORTED, ACTIVE, COMMITTED, CREATED, TIMEOUT;

        public final Attributes attributes = Attributes.empty();
    }
}
