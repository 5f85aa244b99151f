import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.*;
import org.apache.pulsar.common.protocol.schema.PostSchemaPayload;
import org.apache.pulsar.common.schema.SchemaInfo;
import org.apache.pulsar.common.schema.SchemaType;

/** Uses the official admin client, as pulsar-admin does; prints `ok NAME` for each part. Arguments: HTTP URL, service URL. */
public class Administration {
    interface Part {
        void run(PulsarAdmin admin, PulsarClient client) throws Exception;
    }

    interface Refused {
        void run() throws Exception;
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static void equal(Object found, Object wanted) {
        check(wanted == null ? found == null : wanted.equals(found), found + " is not " + wanted);
    }

    static void refused(int status, Refused act) throws Exception {
        try {
            act.run();
        } catch (PulsarAdminException error) {
            equal(error.getStatusCode(), status);
            return;
        }
        throw new AssertionError("not refused with " + status);
    }

    static final String NS = "acme/orders";
    static final String T = "persistent://acme/orders/t";
    static final String P = "persistent://acme/orders/p";

    static void tenants(PulsarAdmin admin, PulsarClient client) throws Exception {
        equal(admin.clusters().getClusters(), List.of("standalone"));
        check(admin.clusters().getCluster("standalone").getServiceUrl() != null, "service URL");
        TenantInfo info = TenantInfo.builder().adminRoles(Set.of("ops")).allowedClusters(Set.of("standalone")).build();
        admin.tenants().createTenant("acme", info);
        refused(409, () -> admin.tenants().createTenant("acme", info));
        equal(admin.tenants().getTenantInfo("acme").getAdminRoles(), Set.of("ops"));
        admin.tenants().updateTenant("acme", TenantInfo.builder().adminRoles(Set.of("a", "b")).allowedClusters(Set.of("standalone")).build());
        check(admin.tenants().getTenants().contains("acme"), "listed");
        refused(404, () -> admin.tenants().getTenantInfo("nobody"));
    }

    static void namespaces(PulsarAdmin admin, PulsarClient client) throws Exception {
        admin.namespaces().createNamespace(NS, 4);
        refused(409, () -> admin.namespaces().createNamespace(NS));
        equal(admin.namespaces().getNamespaces("acme"), List.of(NS));
        equal(admin.namespaces().getBundles(NS).getNumBundles(), 4);
        Policies policies = admin.namespaces().getPolicies(NS);
        equal(policies.replication_clusters, Set.of("standalone"));
        admin.namespaces().createNamespace("acme/other", new HashSet<>(List.of("standalone")));
        Policies given = new Policies();
        given.max_producers_per_topic = 7;
        given.replication_clusters = Set.of("standalone");
        admin.namespaces().createNamespace("acme/third", given);
        equal(admin.namespaces().getMaxProducersPerTopic("acme/third"), 7);
        admin.namespaces().deleteNamespace("acme/other");
        admin.namespaces().deleteNamespace("acme/third", true);
        admin.namespaces().grantPermissionOnNamespace(NS, "r", Set.of(AuthAction.produce, AuthAction.consume));
        equal(admin.namespaces().getPermissions(NS), Map.of("r", Set.of(AuthAction.produce, AuthAction.consume)));
        admin.namespaces().revokePermissionsOnNamespace(NS, "r");
        admin.namespaces().grantPermissionOnSubscription(NS, "s", Set.of("r"));
        admin.namespaces().revokePermissionOnSubscription(NS, "s", "r");
    }

    static void policies(PulsarAdmin admin, PulsarClient client) throws Exception {
        var n = admin.namespaces();
        equal(n.getNamespaceMessageTTL(NS), null);
        n.setNamespaceMessageTTL(NS, 600);
        equal(n.getNamespaceMessageTTL(NS), 600);
        n.removeNamespaceMessageTTL(NS);
        equal(n.getRetention(NS), null);
        n.setRetention(NS, new RetentionPolicies(10, 20));
        equal(n.getRetention(NS), new RetentionPolicies(10, 20));
        n.removeRetention(NS);
        n.setBacklogQuota(NS, BacklogQuota.builder().limitSize(1 << 21).retentionPolicy(BacklogQuota.RetentionPolicy.producer_exception).build());
        equal(n.getBacklogQuotaMap(NS).get(BacklogQuota.BacklogQuotaType.destination_storage).getLimitSize(), (long) (1 << 21));
        n.removeBacklogQuota(NS);
        n.setPersistence(NS, new PersistencePolicies(1, 1, 1, 0.0));
        equal(n.getPersistence(NS).getBookkeeperEnsemble(), 1);
        n.removePersistence(NS);
        n.setDeduplicationStatus(NS, true);
        equal(n.getDeduplicationStatus(NS), true);
        n.removeDeduplicationStatus(NS);
        n.setDispatchRate(NS, DispatchRate.builder().dispatchThrottlingRateInMsg(10).dispatchThrottlingRateInByte(-1).ratePeriodInSecond(1).build());
        equal(n.getDispatchRate(NS).getDispatchThrottlingRateInMsg(), 10);
        n.removeDispatchRate(NS);
        equal(n.getDispatchRate(NS), null);
        n.setPublishRate(NS, new PublishRate(5, 1000));
        equal(n.getPublishRate(NS).publishThrottlingRateInMsg, 5);
        n.removePublishRate(NS);
        n.setSubscribeRate(NS, new SubscribeRate(5, 30));
        equal(n.getSubscribeRate(NS).subscribeThrottlingRatePerConsumer, 5);
        n.removeSubscribeRate(NS);
        n.setAutoTopicCreation(NS, AutoTopicCreationOverride.builder().allowAutoTopicCreation(true).topicType("partitioned").defaultNumPartitions(3).build());
        equal(n.getAutoTopicCreation(NS).getDefaultNumPartitions(), 3);
        n.removeAutoTopicCreation(NS);
        n.setAutoSubscriptionCreation(NS, AutoSubscriptionCreationOverride.builder().allowAutoSubscriptionCreation(false).build());
        equal(n.getAutoSubscriptionCreation(NS).isAllowAutoSubscriptionCreation(), false);
        n.removeAutoSubscriptionCreation(NS);
        n.setMaxConsumersPerTopic(NS, 9);
        equal(n.getMaxConsumersPerTopic(NS), 9);
        n.removeMaxConsumersPerTopic(NS);
        n.setCompactionThreshold(NS, 1L << 30);
        equal(n.getCompactionThreshold(NS), 1L << 30);
        n.removeCompactionThreshold(NS);
        n.setInactiveTopicPolicies(NS, new InactiveTopicPolicies(InactiveTopicDeleteMode.delete_when_no_subscriptions, 60, true));
        equal(n.getInactiveTopicPolicies(NS).getMaxInactiveDurationSeconds(), 60);
        n.removeInactiveTopicPolicies(NS);
        n.setSubscriptionExpirationTime(NS, 5);
        equal(n.getSubscriptionExpirationTime(NS), 5);
        n.removeSubscriptionExpirationTime(NS);
        n.setSubscriptionTypesEnabled(NS, Set.of(SubscriptionType.Shared));
        equal(n.getSubscriptionTypesEnabled(NS), Set.of(SubscriptionType.Shared));
        n.removeSubscriptionTypesEnabled(NS);
        n.setDelayedDeliveryMessages(NS, DelayedDeliveryPolicies.builder().tickTime(1000).active(true).build());
        equal(n.getDelayedDelivery(NS).getTickTime(), 1000L);
        n.removeDelayedDeliveryMessages(NS);
        equal(n.getNamespaceReplicationClusters(NS), List.of("standalone"));
        n.setNamespaceReplicationClusters(NS, Set.of("standalone"));
    }

    static void topics(PulsarAdmin admin, PulsarClient client) throws Exception {
        admin.topics().createNonPartitionedTopic(T);
        refused(409, () -> admin.topics().createNonPartitionedTopic(T));
        admin.topics().createPartitionedTopic(P, 3);
        equal(admin.topics().getPartitionedTopicMetadata(P).partitions, 3);
        equal(admin.topics().getPartitionedTopicList(NS), List.of(P));
        admin.topics().updatePartitionedTopic(P, 4);
        check(new HashSet<>(admin.topics().getList(NS)).containsAll(Set.of(T, P + "-partition-3")), "listed");
        check(admin.namespaces().getTopics(NS).contains(T), "of the namespace");
        check(admin.lookups().lookupTopic(T).startsWith("pulsar://"), "look-up");
        equal(admin.lookups().lookupPartitionedTopic(P).size(), 4);
        check(admin.lookups().getBundleRange(T).startsWith("0x"), "bundle");
        admin.topics().createMissedPartitions(P);
        admin.topics().grantPermission(T, "r", Set.of(AuthAction.consume));
        equal(admin.topics().getPermissions(T), Map.of("r", Set.of(AuthAction.consume)));
        admin.topics().revokePermissions(T, "r");
        admin.topics().unload(T);
        admin.namespaces().unload(NS);
        admin.namespaces().unloadNamespaceBundle(NS, admin.lookups().getBundleRange(T));
        refused(404, () -> admin.topics().getStats("persistent://acme/orders/missing"));
        admin.topicPolicies().setMessageTTL(T, 60);
        equal(admin.topicPolicies().getMessageTTL(T), 60);
        admin.topicPolicies().removeMessageTTL(T);
        equal(admin.topicPolicies().getMessageTTL(T), null);
        admin.topicPolicies().setRetention(T, new RetentionPolicies(-1, -1));
        equal(admin.topicPolicies().getRetention(T), new RetentionPolicies(-1, -1));
        admin.topicPolicies().setMaxProducers(T, 10);
        equal(admin.topicPolicies().getMaxProducers(T), 10);
        equal(admin.topicPolicies().getMaxConsumers(T, true), 0);
        admin.topicPolicies().setPublishRate(T, new PublishRate(500, 1 << 20));
        admin.topicPolicies().removePublishRate(T);
        admin.topicPolicies().setDeduplicationStatus(T, false);
    }

    static void messages(PulsarAdmin admin, PulsarClient client) throws Exception {
        admin.topics().createSubscription(T, "s", MessageId.earliest);
        admin.topics().createSubscription(P, "s", MessageId.latest);
        refused(409, () -> admin.topics().createSubscription(T, "s", MessageId.earliest));
        equal(admin.topics().getSubscriptions(T), List.of("s"));
        Producer<byte[]> producer = client.newProducer().topic(T).enableBatching(false).property("of", "test").create();
        MessageId third = null;
        for (int i = 0; i < 10; i++) {
            MessageId id = producer.newMessage().key("k" + i).property("i", "" + i).value(("m" + i).getBytes()).send();
            third = i == 2 ? id : third;
        }
        TopicStats stats = admin.topics().getStats(T);
        equal(stats.getMsgInCounter(), 10L);
        equal(stats.getPublishers().get(0).getMetadata(), Map.of("of", "test"));
        check(stats.getPublishers().get(0).getClientVersion().contains("4.0.8"), "version of the client");
        equal(stats.getSubscriptions().get("s").getMsgBacklog(), 10L);
        List<Message<byte[]>> shown = admin.topics().peekMessages(T, "s", 3);
        equal(new String(shown.get(2).getData()), "m2");
        equal(shown.get(2).getProperties().get("i"), "2");
        equal(new String(admin.topics().examineMessage(T, "earliest", 5).getData()), "m4");
        check(admin.topics().getLastMessageId(T).compareTo(third) > 0, "last message id");
        check(admin.topics().getMessageIdByTimestamp(T, 0) != null, "by time");
        admin.topics().skipMessages(T, "s", 2);
        equal(admin.topics().getStats(T, true).getSubscriptions().get("s").getMsgBacklog(), 8L);
        admin.topics().resetCursor(T, "s", third);
        equal(admin.topics().getStats(T, true).getSubscriptions().get("s").getMsgBacklog(), 8L);
        admin.topics().resetCursor(T, "s", third, true);
        equal(admin.topics().getStats(T, true).getSubscriptions().get("s").getMsgBacklog(), 7L);
        admin.topics().resetCursor(T, "s", 0L);
        equal(admin.topics().analyzeSubscriptionBacklog(T, "s", java.util.Optional.empty()).getMessages(), 10L);
        admin.topics().skipAllMessages(T, "s");
        admin.topics().expireMessages(T, "s", 1);
        admin.topics().expireMessagesForAllSubscriptions(T, 1);
        admin.topics().skipAllMessages(P, "s");
        equal(admin.topics().getStats(T).getSubscriptions().get("s").getMsgBacklog(), 0L);
        PersistentTopicInternalStats internals = admin.topics().getInternalStats(T);
        check(internals.ledgers.size() > 0 && internals.cursors.containsKey("s"), "internals");
        check(admin.topics().getInternalInfo(T).contains("ledgers"), "info");
        PartitionedTopicStats whole = admin.topics().getPartitionedStats(P, true);
        equal(whole.getPartitions().size(), 4);
        equal(whole.getMetadata().partitions, 4);
        equal(admin.topics().getPartitionedInternalStats(P).partitions.size(), 4);
        admin.topics().updateSubscriptionProperties(T, "s", Map.of("a", "b"));
        equal(admin.topics().getSubscriptionProperties(T, "s"), Map.of("a", "b"));
        Producer<byte[]> batches = client.newProducer().topic("persistent://acme/orders/b").batchingMaxMessages(5).create();
        admin.topics().createSubscription("persistent://acme/orders/b", "s", MessageId.earliest);
        for (int i = 0; i < 5; i++) {
            batches.sendAsync(("b" + i).getBytes());
        }
        batches.flush();
        List<Message<byte[]>> peeked = admin.topics().peekMessages("persistent://acme/orders/b", "s", 5);
        equal(new String(peeked.get(4).getData()), "b4");
        batches.close();
        refused(412, () -> admin.topics().delete(T));
        producer.close();
        admin.topics().deleteSubscription(T, "s");
        admin.topics().triggerCompaction(T);
        check(admin.topics().compactionStatus(T) != null, "compaction");
        check(admin.topics().terminateTopic(T) != null, "terminated");
        admin.topics().truncate(T);
        admin.topics().terminatePartitionedTopic(P);
    }

    static void schemas(PulsarAdmin admin, PulsarClient client) throws Exception {
        String topic = "persistent://acme/orders/typed";
        refused(404, () -> admin.schemas().getSchemaInfo(topic));
        SchemaInfo first = Schema.AVRO(Order.class).getSchemaInfo();
        admin.schemas().createSchema(topic, first);
        equal(admin.schemas().getSchemaInfo(topic).getType(), SchemaType.AVRO);
        equal(admin.schemas().getSchemaInfoWithVersion(topic).getVersion(), 0L);
        equal(admin.schemas().getSchemaInfo(topic, 0).getSchemaDefinition(), first.getSchemaDefinition());
        equal(admin.schemas().getAllSchemas(topic).size(), 1);
        equal(admin.schemas().getVersionBySchema(topic, new PostSchemaPayload("AVRO", first.getSchemaDefinition(), Map.of())), 0L);
        PostSchemaPayload other = new PostSchemaPayload("STRING", "", Map.of());
        check(!admin.schemas().testCompatibility(topic, other).isCompatibility(), "compatibility");
        refused(409, () -> admin.schemas().createSchema(topic, other));
        Producer<Order> producer = client.newProducer(Schema.AVRO(Order.class)).topic(topic).create();
        producer.send(new Order());
        producer.close();
        admin.namespaces().setSchemaCompatibilityStrategy(NS, SchemaCompatibilityStrategy.FORWARD);
        equal(admin.namespaces().getSchemaCompatibilityStrategy(NS), SchemaCompatibilityStrategy.FORWARD);
        admin.namespaces().setIsAllowAutoUpdateSchema(NS, false);
        equal(admin.namespaces().getIsAllowAutoUpdateSchema(NS), false);
        admin.namespaces().setSchemaValidationEnforced(NS, true);
        equal(admin.namespaces().getSchemaValidationEnforced(NS), true);
        admin.namespaces().setSchemaValidationEnforced(NS, false);
        admin.topicPolicies().setSchemaCompatibilityStrategy(topic, SchemaCompatibilityStrategy.BACKWARD);
        equal(admin.topicPolicies().getSchemaCompatibilityStrategy(topic, false), SchemaCompatibilityStrategy.BACKWARD);
        admin.schemas().deleteSchema(topic);
        refused(404, () -> admin.schemas().getSchemaInfo(topic));
    }

    public static class Order {
        public int amount;
        public String name = "n";
    }

    static void end(PulsarAdmin admin, PulsarClient client) throws Exception {
        admin.topics().delete(T);
        admin.topics().deletePartitionedTopic(P, true);
        refused(409, () -> admin.namespaces().deleteNamespace(NS));
        admin.namespaces().deleteNamespace(NS, true);
        admin.tenants().deleteTenant("acme");
        equal(admin.brokers().getActiveBrokers("standalone").size(), 1);
        equal(admin.brokers().getActiveBrokers().size(), 1);
        check(admin.brokers().getLeaderBroker().getServiceUrl() != null, "leader");
        admin.brokers().healthcheck();
        check(!admin.brokers().getRuntimeConfigurations().isEmpty(), "settings");
        check(!admin.brokers().getVersion().isEmpty(), "version");
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, Part> parts = new java.util.LinkedHashMap<>();
        parts.put("tenants", Administration::tenants);
        parts.put("namespaces", Administration::namespaces);
        parts.put("policies", Administration::policies);
        parts.put("topics", Administration::topics);
        parts.put("messages", Administration::messages);
        parts.put("schemas", Administration::schemas);
        parts.put("end", Administration::end);
        try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(arguments[0]).build();
                PulsarClient client = PulsarClient.builder().serviceUrl(arguments[1]).build()) {
            for (Map.Entry<String, Part> part : parts.entrySet()) {
                part.getValue().run(admin, client);
                System.out.println("ok " + part.getKey());
            }
        }
        System.exit(0);
    }
}
