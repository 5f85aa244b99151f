"""Spark by the schema of a topic: columns out of Avro, and rows into JSON.

    pip install 'magnetar[spark]'
    python examples/spark_schemas.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar
from magnetar.schema import AvroSchema, Integer, JsonSchema, Record, String


class Order(Record):
    customer = String(required=True)
    cents = Integer(required=True)


class Total(Record):
    customer = String(required=True)
    orders = Integer(required=True)
    cents = Integer(required=True)


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    orders, totals = f"spark-orders-{run}", f"spark-totals-{run}"
    with magnetar.Client(service_url) as client:
        client.subscribe(orders, "keep").close()
        with client.create_producer(orders, schema=AvroSchema(Order)) as producer:
            for customer, cents in (("Ada", 250), ("Grace", 1000), ("Ada", 750)):
                producer.send(Order(customer=customer, cents=cents))
        consumer = client.subscribe(totals, "dashboard", schema=JsonSchema(Total))

        spark = magnetar.spark_session()
        by_registry = {"service.url": service_url, "schema": "registry"}
        rows = spark.read.format("magnetar").options(**by_registry, topic=orders).load()
        rows.printSchema()
        sums = rows.groupBy("customer").agg({"*": "count", "cents": "sum"})
        sums.selectExpr(
            "customer", "cast(`count(1)` as int) as orders", "cast(`sum(cents)` as int) as cents"
        ).write.format("magnetar").options(**by_registry, topic=totals).mode("append").save()

        received = [consumer.receive(timeout_millis=30_000).value() for _ in range(2)]
        found = sorted(received, key=lambda each: each.customer)
        print(found)
        assert found == [Total(customer="Ada", orders=2, cents=1000), Total(customer="Grace", orders=1, cents=1000)]
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
