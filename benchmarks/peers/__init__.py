"""Pulsar, Kafka and this broker in turns on one machine: `python -m benchmarks.peers`, one table of ratios.

    rows.py                     what is compared: each row's sides, the first one ours
    turns.py                    the sides take turns; a sync and a pause before each, the stolen time beside each
    servers.py, kafka_server.py the servers, with a sync before every acknowledgement; maven.py brings their jars
    apart.py                    a load in a process of its own
    slow.py                     all of it on a part of the processors' time
    sends.py, receives.py       loads of our client and of Pulsar's client for Python, which have one interface
    perf.py                     loads by `pulsar-perf`
    kafka.py, share.py          loads by confluent-kafka
    spark.py                    Spark's read and write, with our connector and with Spark's Kafka connector
    table.py, plot.py           ratios: the JSON object, the table, the picture
"""
