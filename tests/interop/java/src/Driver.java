import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.apache.pulsar.client.api.*;
import org.apache.pulsar.client.api.schema.SchemaDefinition;

/**
 * A driver of the Java client. Argument: the service URL. It reads a command of JSON from each line of stdin and prints
 * its answer as one line, as tests/interop/drivers.py says.
 */
public class Driver {
    static final int WAIT_S = 20;
    static final String KEY_NAME = "interop";
    static final int LONG = 1000;
    static final String PREFIX = "persistent://public/default/";
    static final ObjectMapper JSON = new ObjectMapper();

    public static class Order {
        public int a;
        public String b;
    }

    /** The same two files for each name of a key. */
    record Keys(String publicPath, String privatePath) implements CryptoKeyReader {
        static EncryptionKeyInfo read(String path) {
            try {
                return new EncryptionKeyInfo(Files.readAllBytes(Path.of(path)), Map.of());
            } catch (java.io.IOException failure) {
                throw new IllegalStateException(failure);
            }
        }

        @Override
        public EncryptionKeyInfo getPublicKey(String name, Map<String, String> metadata) {
            return read(publicPath);
        }

        @Override
        public EncryptionKeyInfo getPrivateKey(String name, Map<String, String> metadata) {
            return read(privatePath);
        }
    }

    final PulsarClient client;
    Producer<byte[]> producer;
    Consumer<?> consumer;

    Driver(PulsarClient client) {
        this.client = client;
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    @SuppressWarnings("unchecked")
    static Schema<Object> schema(JsonNode command) {
        SchemaDefinition<Order> order = SchemaDefinition.<Order>builder().withPojo(Order.class).build();
        Schema<?> found = switch (command.path("schema").asText()) {
            case "JSON" -> Schema.JSON(order);
            case "AVRO" -> Schema.AVRO(order);
            case "STRING" -> Schema.STRING;
            default -> Schema.BYTES;
        };
        return (Schema<Object>) found;
    }

    static CryptoKeyReader keys(JsonNode command) {
        return new Keys(command.get("keys").get(0).asText(), command.get("keys").get(1).asText());
    }

    static Object content(JsonNode command, JsonNode message) {
        String text = message.get("text").asText().repeat(message.path("times").asInt(1));
        switch (command.path("schema").asText()) {
            case "":
                return text.getBytes(StandardCharsets.UTF_8);
            case "STRING":
                return text;
            default:
                Order order = new Order();
                order.a = text.length();
                order.b = text;
                return order;
        }
    }

    Map<String, Object> produce(JsonNode command) throws Exception {
        ProducerBuilder<Object> builder = client.newProducer(schema(command)).topic(command.get("topic").asText())
                .enableBatching(command.path("batching").asBoolean())
                .batchingMaxPublishDelay(50, TimeUnit.MILLISECONDS)
                .enableChunking(command.path("chunking").asBoolean())
                .compressionType(CompressionType.valueOf(command.path("compression").asText("NONE").toUpperCase()));
        if (command.has("keys")) {
            builder.cryptoKeyReader(keys(command)).addEncryptionKey(KEY_NAME);
        }
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        try (Producer<Object> producer = builder.create()) {
            for (JsonNode each : command.get("messages")) {
                TypedMessageBuilder<Object> message = producer.newMessage().value(content(command, each));
                if (each.has("key")) {
                    message.key(each.get("key").asText());
                }
                if (each.has("ordering_key")) {
                    message.orderingKey(each.get("ordering_key").asText().getBytes(StandardCharsets.UTF_8));
                }
                each.path("properties").fields().forEachRemaining(
                        entry -> message.property(entry.getKey(), entry.getValue().asText()));
                if (each.has("event_time")) {
                    message.eventTime(each.get("event_time").asLong());
                }
                if (each.has("deliver_after_ms")) {
                    message.deliverAfter(each.get("deliver_after_ms").asLong(), TimeUnit.MILLISECONDS);
                }
                sent.add(message.sendAsync());
            }
            producer.flush();
            for (CompletableFuture<MessageId> each : sent) {
                each.get(WAIT_S, TimeUnit.SECONDS);
            }
        }
        return Map.of("sent", sent.size());
    }

    ConsumerBuilder<Object> subscription(JsonNode command, String topic, String name) {
        String type = command.get("type").asText().equals("KeyShared") ? "Key_Shared" : command.get("type").asText();
        ConsumerBuilder<Object> builder = client.newConsumer(schema(command)).topic(topic).subscriptionName(name)
                .subscriptionType(SubscriptionType.valueOf(type))
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS);
        if (command.has("by_index")) {
            builder = builder.enableBatchIndexAcknowledgment(true).property("magnetar.index_acks", "true");
        }
        return command.has("keys") ? builder.cryptoKeyReader(keys(command)) : builder;
    }

    ConsumerBuilder<Object> subscription(JsonNode command) {
        return subscription(command, command.get("topic").asText(), command.get("subscription").asText());
    }

    static <T> Message<T> next(Consumer<T> consumer) throws Exception {
        Message<T> message = consumer.receive(WAIT_S, TimeUnit.SECONDS);
        check(message != null, "nothing came in " + WAIT_S + " s");
        return message;
    }

    static String text(Message<?> message) {
        return new String(message.getData(), StandardCharsets.UTF_8);
    }

    static Map<String, Object> described(JsonNode command, Message<Object> message) throws Exception {
        byte[] content = message.getData();
        if (message.getValue() instanceof Order order) {
            check(order.a == order.b.length(), "a value that was not sent: " + order.a + " " + order.b);
            content = order.b.getBytes(StandardCharsets.UTF_8);
        }
        String text = content.length < LONG ? new String(content, StandardCharsets.UTF_8)
                : HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(content));
        byte[] orderingKey = message.hasOrderingKey() ? message.getOrderingKey() : new byte[0];
        return Map.of("text", text, "key", message.hasKey() ? message.getKey() : "",
                "ordering_key", new String(orderingKey, StandardCharsets.UTF_8),
                "properties", message.getProperties(), "event_time", message.getEventTime(),
                "batch_index", ((MessageIdAdv) message.getMessageId()).getBatchIndex(),
                "age_ms", System.currentTimeMillis() - message.getPublishTime());
    }

    Map<String, Object> consume(JsonNode command) throws Exception {
        List<Object> found = new ArrayList<>();
        try (Consumer<Object> consumer = subscription(command).subscribe()) {
            for (int i = 0; i < command.get("count").asInt(); i++) {
                Message<Object> message = next(consumer);
                found.add(described(command, message));
                consumer.acknowledge(message);
            }
        }
        return Map.of("messages", found);
    }

    Map<String, Object> deadLetter(JsonNode command) throws Exception {
        String topic = command.get("letters").asText();
        int count = command.get("count").asInt();
        DeadLetterPolicy policy = DeadLetterPolicy.builder().maxRedeliverCount(1).deadLetterTopic(topic).build();
        List<String> found = new ArrayList<>();
        try (Consumer<Object> letters = subscription(command, topic, "check").subscribe();
                Consumer<Object> consumer = subscription(command).deadLetterPolicy(policy).subscribe()) {
            for (int i = 0; i < 2 * count; i++) {
                consumer.negativeAcknowledge(next(consumer));
            }
            consumer.receiveAsync();
            for (int i = 0; i < count; i++) {
                found.add(text(next(letters)));
            }
        }
        return Map.of("letters", found);
    }

    Map<String, Object> open(JsonNode command) throws Exception {
        producer = client.newProducer().topic(command.get("topic").asText()).create();
        consumer = subscription(command).subscribe();
        return Map.of();
    }

    Map<String, Object> send(JsonNode command) throws Exception {
        for (JsonNode each : command.get("texts")) {
            producer.send(each.asText().getBytes(StandardCharsets.UTF_8));
        }
        return Map.of();
    }

    /** Until all of these texts came; what was acknowledged before may come again. */
    Map<String, Object> receive(JsonNode command) throws Exception {
        Set<String> missing = new HashSet<>();
        command.get("texts").forEach(each -> missing.add(each.asText()));
        List<String> came = new ArrayList<>();
        while (!missing.isEmpty()) {
            Message<?> message = next(consumer);
            consumer.acknowledge(message);
            came.add(text(message));
            missing.remove(text(message));
        }
        return Map.of("came", came);
    }

    interface Example {
        void run(String topic) throws Exception;
    }

    /** What the client's documentation shows first, each once. */
    Map<String, Object> examples(JsonNode command) throws Exception {
        Map<String, Example> shown = new java.util.TreeMap<>(Map.of("producer and consumer", this::showConsumer,
                "reader", this::showReader, "table view", this::showTableView, "multi-topics", this::showTopics,
                "pattern", this::showPattern, "listener", this::showListener));
        int number = 0;
        for (Example each : shown.values()) {
            each.run(command.get("topic").asText() + "-" + number++);
        }
        return Map.of("ran", shown.keySet());
    }

    void publish(String topic, String... texts) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic).create()) {
            for (String text : texts) {
                producer.send(text.getBytes(StandardCharsets.UTF_8));
            }
        }
    }

    void showConsumer(String topic) throws Exception {
        try (Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("my-sub").subscribe()) {
            publish(topic, "hello-0", "hello-1");
            for (int i = 0; i < 2; i++) {
                Message<byte[]> message = next(consumer);
                check(text(message).equals("hello-" + i), text(message));
                consumer.acknowledge(message);
            }
        }
    }

    void showReader(String topic) throws Exception {
        publish(topic, "one", "two");
        try (Reader<byte[]> reader =
                client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
            List<String> found = new ArrayList<>();
            while (reader.hasMessageAvailable()) {
                found.add(text(reader.readNext(WAIT_S, TimeUnit.SECONDS)));
            }
            check(found.equals(List.of("one", "two")), found.toString());
        }
    }

    void showTableView(String topic) throws Exception {
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).create()) {
            for (int i = 0; i < 6; i++) {
                producer.newMessage().key("k" + i % 2).value("" + i).send();
            }
        }
        // of a short name Java's client would not wait for what is stored
        try (TableView<String> view = client.newTableView(Schema.STRING).topic(PREFIX + topic).create()) {
            check(view.size() == 2 && view.get("k0").equals("4") && view.get("k1").equals("5"), "" + view.entrySet());
        }
    }

    void showTopics(String topic) throws Exception {
        both(topic, client.newConsumer().topic(PREFIX + topic + "-a", PREFIX + topic + "-b"));
    }

    void showPattern(String topic) throws Exception {
        publish(topic + "-a");
        publish(topic + "-b");
        both(topic, client.newConsumer().topicsPattern(Pattern.compile(PREFIX + topic + "-.*")));
    }

    void both(String topic, ConsumerBuilder<byte[]> builder) throws Exception {
        try (Consumer<byte[]> consumer = builder.subscriptionName("my-sub")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
            publish(topic + "-a", "a");
            publish(topic + "-b", "b");
            check(!text(next(consumer)).equals(text(next(consumer))), "both topics");
        }
    }

    void showListener(String topic) throws Exception {
        LinkedBlockingQueue<String> found = new LinkedBlockingQueue<>();
        try (Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("my-sub")
                .messageListener((from, message) -> {
                    found.add(text(message));
                    from.acknowledgeAsync(message);
                }).subscribe()) {
            publish(topic, "heard");
            check("heard".equals(found.poll(WAIT_S, TimeUnit.SECONDS)), "nothing was heard");
        }
    }

    Map<String, Object> run(JsonNode command) throws Exception {
        return switch (command.get("do").asText()) {
            case "produce" -> produce(command);
            case "consume" -> consume(command);
            case "dead_letter" -> deadLetter(command);
            case "open" -> open(command);
            case "send" -> send(command);
            case "receive" -> receive(command);
            case "examples" -> examples(command);
            default -> throw new IllegalArgumentException("no command " + command);
        };
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Driver driver = new Driver(PulsarClient.builder().serviceUrl(arguments[0]).build());
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer;
            try {
                answer = driver.run(JSON.readTree(line));
            } catch (Throwable failure) {
                java.io.StringWriter trace = new java.io.StringWriter();
                failure.printStackTrace(new java.io.PrintWriter(trace));
                answer = Map.of("error", trace.toString());
            }
            System.out.println(JSON.writeValueAsString(answer));
        }
        System.exit(0);
    }
}
