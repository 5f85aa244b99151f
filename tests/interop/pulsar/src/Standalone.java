import java.io.IOException;
import org.apache.pulsar.PulsarStandaloneStarter;

/** Pulsar in one process, by the arguments of `pulsar standalone`; it ends when its standard input does. */
public final class Standalone {
    public static void main(String[] arguments) throws Exception {
        PulsarStandaloneStarter starter = new PulsarStandaloneStarter(arguments);
        Thread ends = new Thread(() -> {
            try {
                while (System.in.read() >= 0) {
                    continue;
                }
            } catch (IOException closed) {
                // as its end
            }
            Runtime.getRuntime().halt(0);
        });
        ends.setDaemon(true);
        ends.start();
        starter.start();
        System.out.println("ready");
    }
}
