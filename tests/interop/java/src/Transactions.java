import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.*;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The transactions of the official client; prints `ok NAME` for each part. Argument: the service URL. */
public class Transactions {
    interface Part {
        void run(PulsarClient client) throws Exception;
    }

    static final Map<String, Part> PARTS = new LinkedHashMap<>();

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static Producer<byte[]> producer(PulsarClient client, String topic, boolean batching) throws Exception {
        return client.newProducer().topic(topic).sendTimeout(0, TimeUnit.SECONDS).enableBatching(batching).create();
    }

    static Consumer<byte[]> consumer(PulsarClient client, String topic, SubscriptionType type) throws Exception {
        return client.newConsumer().topic(topic).subscriptionName("s").subscriptionType(type)
                .enableBatchIndexAcknowledgment(true).isAckReceiptEnabled(true)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    static Transaction begin(PulsarClient client, int seconds) throws Exception {
        return client.newTransaction().withTransactionTimeout(seconds, TimeUnit.SECONDS).build().get();
    }

    static String next(Consumer<byte[]> consumer, int millis) throws Exception {
        Message<byte[]> message = consumer.receive(millis, TimeUnit.MILLISECONDS);
        return message == null ? null : new String(message.getData());
    }

    /** Messages of several topics are hidden until the commit, and all there after it. */
    static void commits(PulsarClient client) throws Exception {
        Consumer<byte[]> a = consumer(client, "t-a", SubscriptionType.Exclusive);
        Consumer<byte[]> b = consumer(client, "t-b", SubscriptionType.Shared);
        Producer<byte[]> toA = producer(client, "t-a", true);
        Producer<byte[]> toB = producer(client, "t-b", false);
        Transaction txn = begin(client, 60);
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (int i = 0; i < 20; i++) {
            sent.add(toA.newMessage(txn).value(("a" + i).getBytes()).sendAsync());
            sent.add(toB.newMessage(txn).value(("b" + i).getBytes()).sendAsync());
        }
        for (CompletableFuture<MessageId> each : sent) {
            each.get(20, TimeUnit.SECONDS);
        }
        check(next(a, 500) == null && next(b, 500) == null, "an open transaction is seen");
        txn.commit().get(20, TimeUnit.SECONDS);
        check(txn.getState() == Transaction.State.COMMITTED, "state " + txn.getState());
        for (int i = 0; i < 20; i++) {
            String got = next(a, 20000);
            check(("a" + i).equals(got), "a" + i + " is " + got);
            check(("b" + i).equals(next(b, 20000)), "b" + i);
        }
    }

    /** Nothing of an aborted transaction is seen, and what was acknowledged in it comes again. */
    static void aborts(PulsarClient client) throws Exception {
        Consumer<byte[]> from = consumer(client, "t-from", SubscriptionType.Shared);
        Consumer<byte[]> to = consumer(client, "t-to", SubscriptionType.Shared);
        producer(client, "t-from", false).send("work".getBytes());
        Producer<byte[]> results = producer(client, "t-to", false);
        Message<byte[]> work = from.receive(20, TimeUnit.SECONDS);
        Transaction txn = begin(client, 60);
        results.newMessage(txn).value("wrong".getBytes()).send();
        from.acknowledgeAsync(work.getMessageId(), txn).get(20, TimeUnit.SECONDS);
        txn.abort().get(20, TimeUnit.SECONDS);
        check(txn.getState() == Transaction.State.ABORTED, "state " + txn.getState());
        work = from.receive(20, TimeUnit.SECONDS);
        check(work != null && new String(work.getData()).equals("work"), "it comes again");
        txn = begin(client, 60);
        results.newMessage(txn).value("right".getBytes()).send();
        from.acknowledgeAsync(work.getMessageId(), txn).get(20, TimeUnit.SECONDS);
        txn.commit().get(20, TimeUnit.SECONDS);
        check("right".equals(next(to, 20000)), "the result");
        check(next(to, 300) == null, "the aborted one");
        from.close();
        check(next(consumer(client, "t-from", SubscriptionType.Shared), 500) == null, "it was acknowledged");
    }

    /** Of two transactions that acknowledge one message one gets a conflict. */
    static void conflicts(PulsarClient client) throws Exception {
        Consumer<byte[]> consumer = consumer(client, "t-conflict", SubscriptionType.Shared);
        producer(client, "t-conflict", false).send("one".getBytes());
        MessageId id = consumer.receive(20, TimeUnit.SECONDS).getMessageId();
        Transaction first = begin(client, 60);
        Transaction second = begin(client, 60);
        consumer.acknowledgeAsync(id, first).get(20, TimeUnit.SECONDS);
        try {
            consumer.acknowledgeAsync(id, second).get(20, TimeUnit.SECONDS);
            check(false, "no conflict");
        } catch (ExecutionException expected) {
            check(expected.getCause() instanceof PulsarClientException.TransactionConflictException,
                    "" + expected.getCause());
        }
        second.abort().get(20, TimeUnit.SECONDS);
        first.commit().get(20, TimeUnit.SECONDS);
    }

    /** A part of a batch, and all up to a message. */
    static void batches(PulsarClient client) throws Exception {
        Consumer<byte[]> consumer = consumer(client, "t-batch", SubscriptionType.Exclusive);
        Producer<byte[]> producer = client.newProducer().topic("t-batch").batchingMaxPublishDelay(1, TimeUnit.SECONDS)
                .create();
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (int i = 0; i < 10; i++) {
            sent.add(producer.sendAsync(("m" + i).getBytes()));
        }
        producer.flush();
        for (CompletableFuture<MessageId> each : sent) {
            each.get();
        }
        Transaction txn = begin(client, 60);
        for (int i = 0; i < 4; i++) {
            consumer.acknowledgeAsync(consumer.receive(20, TimeUnit.SECONDS).getMessageId(), txn).get();
        }
        txn.commit().get(20, TimeUnit.SECONDS);
        txn = begin(client, 60);
        MessageId last = null;
        for (int i = 4; i < 8; i++) {
            last = consumer.receive(20, TimeUnit.SECONDS).getMessageId();
        }
        consumer.acknowledgeCumulativeAsync(last, txn).get(20, TimeUnit.SECONDS);
        txn.commit().get(20, TimeUnit.SECONDS);
        consumer.close();
        consumer = consumer(client, "t-batch", SubscriptionType.Exclusive);
        check("m8".equals(next(consumer, 20000)) && "m9".equals(next(consumer, 20000)), "what is left of the batch");
    }

    /** A transaction that takes too long is aborted by its coordinator. */
    static void ends(PulsarClient client) throws Exception {
        Consumer<byte[]> consumer = consumer(client, "t-late", SubscriptionType.Shared);
        Producer<byte[]> producer = producer(client, "t-late", false);
        Transaction txn = begin(client, 2);
        producer.newMessage(txn).value("late".getBytes()).send();
        producer.send("plain".getBytes());
        check("plain".equals(next(consumer, 30000)), "what came after it");
        try {
            txn.commit().get(20, TimeUnit.SECONDS);
            check(false, "it was committed");
        } catch (ExecutionException expected) {
            check(expected.getMessage() != null, "a text");
        }
        check(next(consumer, 300) == null, "the late one");
    }

    public static void main(String[] arguments) throws Exception {
        PARTS.put("commits", Transactions::commits);
        PARTS.put("aborts", Transactions::aborts);
        PARTS.put("conflicts", Transactions::conflicts);
        PARTS.put("batches", Transactions::batches);
        PARTS.put("ends", Transactions::ends);
        int failed = 0;
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).enableTransaction(true).build()) {
            for (Map.Entry<String, Part> part : PARTS.entrySet()) {
                try {
                    part.getValue().run(client);
                    System.out.println("ok " + part.getKey());
                } catch (Throwable failure) {
                    failed++;
                    System.out.println("failed " + part.getKey() + ": " + failure);
                    failure.printStackTrace();
                }
            }
        }
        System.exit(failed == 0 ? 0 : 1);
    }
}
