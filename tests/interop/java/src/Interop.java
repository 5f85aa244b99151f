import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.apache.pulsar.client.api.*;
import org.apache.pulsar.client.api.schema.GenericRecord;

/** Uses the official client as its documentation does; prints `ok NAME` for each part. Argument: the service URL. */
public class Interop {
    interface Part {
        void run(PulsarClient client) throws Exception;
    }

    static final Map<String, Part> PARTS = new java.util.LinkedHashMap<>();

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static String text(Message<byte[]> message) {
        return message == null ? null : new String(message.getData());
    }

    static Message<byte[]> next(Consumer<byte[]> consumer) throws Exception {
        return consumer.receive(20, TimeUnit.SECONDS);
    }

    static ConsumerBuilder<byte[]> consumer(PulsarClient client, String topic, SubscriptionType type) {
        return client.newConsumer().topic(topic).subscriptionName("s").subscriptionType(type)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS);
    }

    static void batches(PulsarClient client) throws Exception {
        Producer<byte[]> producer = client.newProducer().topic("j-batch").compressionType(CompressionType.LZ4)
                .batchingMaxPublishDelay(5, TimeUnit.MILLISECONDS).create();
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (int i = 0; i < 500; i++) {
            sent.add(producer.newMessage().key("k" + i % 7).property("i", "" + i).value(("m" + i).getBytes()).sendAsync());
        }
        for (CompletableFuture<MessageId> each : sent) {
            each.get();
        }
        Consumer<byte[]> consumer = consumer(client, "j-batch", SubscriptionType.Shared)
                .enableBatchIndexAcknowledgment(true).isAckReceiptEnabled(true).subscribe();
        List<CompletableFuture<Void>> acknowledged = new ArrayList<>();
        Message<byte[]> last = null;
        for (int i = 0; i < 500; i++) {
            last = next(consumer);
            check(text(last).equals("m" + i) && last.getProperty("i").equals("" + i), "order at " + i);
            if (i < 499) {
                acknowledged.add(consumer.acknowledgeAsync(last));
            }
        }
        for (CompletableFuture<Void> each : acknowledged) {
            each.get(20, TimeUnit.SECONDS);
        }
        consumer.negativeAcknowledge(last);
        Message<byte[]> again = next(consumer);
        check(text(again).equals("m499") && again.getRedeliveryCount() == 1, text(again) + again.getRedeliveryCount());
        consumer.acknowledge(again);
        consumer.seek(MessageId.earliest);
        check(text(next(consumer)).equals("m0"), "seek");
        consumer.seek(System.currentTimeMillis() - 3_600_000);
        check(text(next(consumer)).equals("m0"), "seek by time");
        Reader<byte[]> reader = client.newReader().topic("j-batch").startMessageId(MessageId.earliest).create();
        int count = 0;
        while (reader.hasMessageAvailable()) {
            reader.readNext();
            count++;
        }
        check(count == 500, "read " + count);
        reader = client.newReader().topic("j-batch").startMessageFromRollbackDuration(1, TimeUnit.HOURS).create();
        check(new String(reader.readNext(20, TimeUnit.SECONDS).getData()).equals("m0"), "rollback");
    }

    static void chunks(PulsarClient client) throws Exception {
        byte[] content = new byte[12 << 20];
        new Random(1).nextBytes(content);
        client.newProducer().topic("j-chunk").enableBatching(false).enableChunking(true).create().send(content);
        Consumer<byte[]> consumer = consumer(client, "j-chunk", SubscriptionType.Exclusive).subscribe();
        check(Arrays.equals(next(consumer).getData(), content), "content");
    }

    static void keys(PulsarClient client) throws Exception {
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (int i = 0; i < 2; i++) {
            consumers.add(consumer(client, "j-keys", SubscriptionType.Key_Shared).subscribe());
        }
        Producer<byte[]> producer =
                client.newProducer().topic("j-keys").batcherBuilder(BatcherBuilder.KEY_BASED).create();
        for (int i = 0; i < 100; i++) {
            producer.newMessage().key("k" + i % 20).value(new byte[] {1}).sendAsync();
        }
        producer.flush();
        Map<String, Set<Integer>> owners = new HashMap<>();
        int count = 0;
        for (int i = 0; i < 2; i++) {
            Message<byte[]> message;
            while ((message = consumers.get(i).receive(500, TimeUnit.MILLISECONDS)) != null) {
                owners.computeIfAbsent(message.getKey(), key -> new HashSet<>()).add(i);
                count++;
            }
        }
        check(count == 100 && owners.values().stream().allMatch(each -> each.size() == 1), "owners " + owners);
        consumer(client, "j-sticky", SubscriptionType.Key_Shared)
                .keySharedPolicy(KeySharedPolicy.stickyHashRange().ranges(Range.of(0, 65535))).subscribe();
        try {
            consumer(client, "j-sticky", SubscriptionType.Key_Shared)
                    .keySharedPolicy(KeySharedPolicy.stickyHashRange().ranges(Range.of(0, 10))).subscribe();
            check(false, "overlapping ranges");
        } catch (PulsarClientException.ConsumerAssignException expected) {
            check(expected.getMessage() != null, "a text");
        }
    }

    static void letters(PulsarClient client) throws Exception {
        DeadLetterPolicy policy =
                DeadLetterPolicy.builder().maxRedeliverCount(1).initialSubscriptionName("letters").build();
        Consumer<byte[]> consumer =
                consumer(client, "j-orders", SubscriptionType.Shared).deadLetterPolicy(policy).subscribe();
        long began = System.nanoTime();
        client.newProducer().topic("j-orders").create().newMessage().value("bad".getBytes())
                .deliverAfter(500, TimeUnit.MILLISECONDS).send();
        for (int i = 0; i < 2; i++) {
            consumer.negativeAcknowledge(next(consumer));
        }
        check(System.nanoTime() - began > 500_000_000L, "delay");
        consumer.receiveAsync();
        Consumer<byte[]> letters = client.newConsumer().topic("persistent://public/default/j-orders-s-DLQ")
                .subscriptionName("letters").subscriptionType(SubscriptionType.Shared).subscribe();
        check(text(next(letters)).equals("bad"), "letter");
    }

    static void failover(PulsarClient client) throws Exception {
        Consumer<byte[]> first =
                consumer(client, "j-failover", SubscriptionType.Failover).consumerName("a").subscribe();
        Consumer<byte[]> second =
                consumer(client, "j-failover", SubscriptionType.Failover).consumerName("b").subscribe();
        Producer<byte[]> producer = client.newProducer().topic("j-failover").create();
        for (int i = 0; i < 5; i++) {
            producer.send(new byte[] {(byte) i});
        }
        first.acknowledgeCumulative(next(first));
        first.redeliverUnacknowledgedMessages();
        check(next(first).getData()[0] == 1, "redelivered, with a consumer epoch");
        first.close();
        check(next(second).getData()[0] == 1, "the next consumer");
    }

    static void patterns(PulsarClient client) throws Exception {
        for (String topic : List.of("j-pattern-a", "j-pattern-b")) {
            client.newProducer().topic(topic).create().send(topic.getBytes());
        }
        Consumer<byte[]> consumer = client.newConsumer()
                .topicsPattern(Pattern.compile("persistent://public/default/j-pattern-.*")).subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
        check(!text(next(consumer)).equals(text(next(consumer))), "both topics");
        client.newProducer().topic("j-pattern-c").create().send("late".getBytes());
        Message<byte[]> late = consumer.receive(10, TimeUnit.SECONDS); // by a watcher: the client asks once a minute
        check(late != null && text(late).equals("late"), "a topic that matches later");
        Consumer<byte[]> volatiles =
                client.newConsumer().topic("non-persistent://public/default/j-now").subscriptionName("s").subscribe();
        client.newProducer().topic("non-persistent://public/default/j-now").create().send("now".getBytes());
        check(text(next(volatiles)).equals("now"), "non-persistent");
        Consumer<String> typed = client.newConsumer(Schema.STRING).topic("j-text").subscriptionName("s").subscribe();
        client.newProducer(Schema.STRING).topic("j-text").create().send("text");
        check(typed.receive(20, TimeUnit.SECONDS).getValue().equals("text"), "a primitive schema");
        check(client.getPartitionsForTopic("j-text").get().size() == 1, "partitions");
    }

    public static class Order {
        public int a;
        public String b;
    }

    /** Bytes that the topic's schema has to fit, and records whose schema the topic gives. */
    static void automatic(PulsarClient client) throws Exception {
        Producer<Order> producer = client.newProducer(Schema.JSON(Order.class)).topic("j-automatic").create();
        Consumer<GenericRecord> consumer = client.newConsumer(Schema.AUTO_CONSUME()).topic("j-automatic")
                .subscriptionName("s").subscribe();
        Order order = new Order();
        order.a = 1;
        producer.send(order);
        Producer<byte[]> bytes = client.newProducer(Schema.AUTO_PRODUCE_BYTES()).topic("j-automatic").create();
        bytes.send("{\"a\":2,\"b\":\"two\"}".getBytes());
        try {
            bytes.send("no JSON".getBytes());
            check(false, "bytes that the schema does not fit");
        } catch (SchemaSerializationException expected) {
            check(expected.getMessage() != null, "a text");
        }
        for (int a = 1; a <= 2; a++) {
            GenericRecord record = consumer.receive(20, TimeUnit.SECONDS).getValue();
            check(record.getField("a").toString().equals("" + a), "field a of record " + a);
        }
    }

    static void exclusive(PulsarClient client) throws Exception {
        ProducerBuilder<byte[]> builder = client.newProducer().topic("j-exclusive");
        Producer<byte[]> first = builder.accessMode(ProducerAccessMode.Exclusive).create();
        try {
            builder.accessMode(ProducerAccessMode.Exclusive).create();
            check(false, "a second exclusive producer");
        } catch (PulsarClientException.ProducerFencedException expected) {
            check(expected.getMessage() != null, "a text");
        }
        CompletableFuture<Producer<byte[]>> waits =
                builder.accessMode(ProducerAccessMode.WaitForExclusive).createAsync();
        Thread.sleep(1500);
        check(!waits.isDone(), "it waits");
        first.close();
        waits.get(20, TimeUnit.SECONDS).send(new byte[] {9});
    }

    public static void main(String[] arguments) throws Exception {
        PARTS.put("batches", Interop::batches);
        PARTS.put("chunks", Interop::chunks);
        PARTS.put("keys", Interop::keys);
        PARTS.put("letters", Interop::letters);
        PARTS.put("failover", Interop::failover);
        PARTS.put("patterns", Interop::patterns);
        PARTS.put("exclusive", Interop::exclusive);
        PARTS.put("automatic", Interop::automatic);
        int failed = 0;
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            for (Map.Entry<String, Part> part : PARTS.entrySet()) {
                try {
                    part.getValue().run(client);
                    System.out.println("ok " + part.getKey());
                } catch (Throwable failure) {
                    failed++;
                    System.out.println("failed " + part.getKey() + ": " + failure);
                }
            }
        }
        System.exit(failed == 0 ? 0 : 1);
    }
}
