import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * Java's client for tests/chaos/workload/libraries.py: each line of stdin is a request with an id, each line of stdout its
 * answer. Sends and acknowledgements are begun in the order of their requests; what waits does so in a thread of its own.
 */
public final class ChaosDriver {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final ExecutorService THREADS = Executors.newCachedThreadPool();
    private static final AtomicLong NUMBERS = new AtomicLong();
    private static final Map<Long, Producer<byte[]>> PRODUCERS = new ConcurrentHashMap<>();
    private static final Map<Long, Consumer<byte[]>> CONSUMERS = new ConcurrentHashMap<>();
    private static final Map<Long, Message<byte[]>> HELD = new ConcurrentHashMap<>();
    private static final Map<Long, Transaction> TRANSACTIONS = new ConcurrentHashMap<>();

    interface Work {
        void run(ObjectNode answer) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).enableTransaction(true)
                .operationTimeout(10, TimeUnit.SECONDS).build();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            take(client, JSON.readTree(line));
        }
        System.exit(0);
    }

    private static void take(PulsarClient client, JsonNode asked) {
        long id = asked.get("id").asLong();
        switch (asked.get("do").asText()) {
            case "producer" -> later(id, answer -> {
                Producer<byte[]> made = client.newProducer().topic(text(asked, "topic")).producerName(text(asked, "name"))
                        .batchingMaxMessages(4).create();
                answer.put("handle", kept(PRODUCERS, made));
            });
            case "send" -> send(id, asked);
            case "flush" -> later(id, answer -> PRODUCERS.get(handle(asked)).flush());
            case "subscribe" -> later(id, answer -> {
                Consumer<byte[]> made = client.newConsumer().topic(text(asked, "topic"))
                        .subscriptionName(text(asked, "subscription"))
                        .subscriptionType(SubscriptionType.valueOf(text(asked, "type")))
                        .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).receiverQueueSize(100)
                        .enableBatchIndexAcknowledgment(asked.get("index_acks").asBoolean())
                        .negativeAckRedeliveryDelay(300, TimeUnit.MILLISECONDS).subscribe();
                answer.put("handle", kept(CONSUMERS, made));
            });
            case "receive" -> later(id, answer -> receive(CONSUMERS.get(handle(asked)), asked, answer));
            case "ack" -> acknowledge(id, asked);
            case "nack" -> CONSUMERS.get(handle(asked)).negativeAcknowledge(HELD.remove(asked.get("message").asLong()));
            case "begin" -> later(id, answer -> {
                Transaction made = client.newTransaction()
                        .withTransactionTimeout(asked.get("timeout_ms").asLong(), TimeUnit.MILLISECONDS).build().get();
                answer.put("handle", kept(TRANSACTIONS, made)).put("txn", made.getTxnID().toString());
            });
            case "commit" -> later(id, answer -> TRANSACTIONS.remove(handle(asked)).commit().get());
            case "abort" -> later(id, answer -> TRANSACTIONS.remove(handle(asked)).abort().get());
            case "close" -> later(id, answer -> close(handle(asked)));
            default -> throw new IllegalArgumentException(asked.toString());
        }
    }

    private static void send(long id, JsonNode asked) {
        Producer<byte[]> producer = PRODUCERS.get(handle(asked));
        TypedMessageBuilder<byte[]> message =
                asked.has("txn") ? producer.newMessage(transaction(asked)) : producer.newMessage();
        message.key(text(asked, "key")).value(text(asked, "value").getBytes()).sendAsync().whenComplete((at, failure) -> {
            ObjectNode answer = JSON.createObjectNode().put("id", id);
            if (failure == null) {
                put(answer, at);
            } else {
                answer.put("error", failure.toString());
            }
            tell(answer);
        });
    }

    /** In a transaction it is answered, and the message is held: it may be refused later. */
    private static void acknowledge(long id, JsonNode asked) {
        Consumer<byte[]> consumer = CONSUMERS.get(handle(asked));
        if (!asked.has("txn")) {
            consumer.acknowledgeAsync(HELD.remove(asked.get("message").asLong()));
            return;
        }
        MessageId message = HELD.get(asked.get("message").asLong()).getMessageId();
        consumer.acknowledgeAsync(message, transaction(asked)).whenComplete((done, failure) -> {
            ObjectNode answer = JSON.createObjectNode().put("id", id);
            if (failure != null) {
                answer.put("error", failure.toString());
            }
            tell(answer);
        });
    }

    private static void receive(Consumer<byte[]> consumer, JsonNode asked, ObjectNode answer) throws Exception {
        Message<byte[]> message = consumer.receive(asked.get("timeout_ms").asInt(), TimeUnit.MILLISECONDS);
        answer.put("lost", consumer.getLastDisconnectedTimestamp());
        if (message != null) {
            long number = NUMBERS.incrementAndGet();
            HELD.put(number, message);
            put(answer, message.getMessageId());
            answer.put("message", number).put("value", new String(message.getData()));
            answer.put("redelivery", message.getRedeliveryCount());
        }
    }

    private static void close(long handle) throws Exception {
        Consumer<byte[]> consumer = CONSUMERS.remove(handle);
        if (consumer != null) {
            consumer.close();
        }
        Producer<byte[]> producer = PRODUCERS.remove(handle);
        if (producer != null) {
            producer.close();
        }
    }

    private static void later(long id, Work work) {
        THREADS.execute(() -> {
            ObjectNode answer = JSON.createObjectNode().put("id", id);
            try {
                work.run(answer);
            } catch (Exception failure) {
                answer.put("error", failure.toString());
            }
            tell(answer);
        });
    }

    private static <T> long kept(Map<Long, T> where, T made) {
        long number = NUMBERS.incrementAndGet();
        where.put(number, made);
        return number;
    }

    private static void put(ObjectNode answer, MessageId id) {
        MessageIdAdv place = (MessageIdAdv) id;
        answer.putArray("at").add(place.getLedgerId()).add(place.getEntryId()).add(place.getBatchIndex());
    }

    private static Transaction transaction(JsonNode asked) {
        return TRANSACTIONS.get(asked.get("txn").asLong());
    }

    private static long handle(JsonNode asked) {
        return asked.get("handle").asLong();
    }

    private static String text(JsonNode asked, String name) {
        return asked.get(name).asText();
    }

    private static synchronized void tell(ObjectNode answer) {
        System.out.println(answer);
        System.out.flush();
    }
}
