"""Administration: namespaces, policies, topics and subscriptions from a program.

    python examples/administration.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar
from magnetar.admin import Admin, Policies, errors


def main(service_url: str) -> None:
    namespace = f"public/shop-{uuid4().hex[:8]}"
    topic = f"persistent://{namespace}/orders"
    with Admin(service_url) as admin, magnetar.Client(service_url) as client:
        admin.create_namespace(namespace)
        admin.set_namespace_policies(namespace, Policies(retention_minutes=60, retention_mib=100, message_ttl_s=600))
        admin.create_topic(topic, partitions=2)
        for part in admin.parts(topic):
            admin.create_subscription(part, "billing")
        print(admin.topics(namespace), "with", admin.partitions(topic), "partitions")

        with client.create_producer(topic) as producer:
            for number in range(10):
                producer.send(f"order {number}".encode())

        for part in admin.parts(topic):
            stats = admin.topic_stats(part)
            (billing,) = stats.subscriptions
            print(part, "owned by", stats.owner, "has", stats.messages_in, "messages, backlog", billing.backlog)
        backlogs = [admin.topic_stats(part).subscriptions[0].backlog for part in admin.parts(topic)]
        assert sum(backlogs) == 10

        for part in admin.parts(topic):
            admin.skip_messages(part, "billing")  # acknowledges all of them
        assert not any(admin.topic_stats(part).subscriptions[0].backlog for part in admin.parts(topic))

        admin.delete_topic(topic, force=True)
        try:
            admin.partitions(topic)
        except errors.TopicNotFound as error:
            print("after its deletion:", error)
        else:
            raise AssertionError("the topic was deleted")
        admin.delete_namespace(namespace)


if __name__ == "__main__":
    main(sys.argv[1])
