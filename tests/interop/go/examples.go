package main

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

const prefix = "persistent://public/default/"

// What the client's documentation shows first, each once.
func (d *Driver) examples(command *Command) (Answer, error) {
	shown := []struct {
		name string
		run  func(topic string) error
	}{
		{"listener", d.showChannel}, {"multi-topics", d.showTopics}, {"pattern", d.showPattern},
		{"producer and consumer", d.showConsumer}, {"reader", d.showReader}, {"table view", d.showTableView},
	}
	names := []string{}
	for i, each := range shown {
		if err := each.run(fmt.Sprintf("%s-%d", command.Topic, i)); err != nil {
			return nil, fmt.Errorf("%s: %w", each.name, err)
		}
		names = append(names, each.name)
	}
	return Answer{"ran": names}, nil
}

func (d *Driver) publish(topic string, messages ...*pulsar.ProducerMessage) error {
	return d.publishTyped(topic, nil, messages...)
}

func (d *Driver) publishTyped(topic string, schema pulsar.Schema, messages ...*pulsar.ProducerMessage) error {
	producer, err := d.client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Schema: schema})
	if err != nil {
		return err
	}
	defer producer.Close()
	for _, message := range messages {
		if _, err := producer.Send(context.Background(), message); err != nil {
			return err
		}
	}
	return nil
}

func text(content string) *pulsar.ProducerMessage {
	return &pulsar.ProducerMessage{Payload: []byte(content)}
}

func (d *Driver) showConsumer(topic string) error {
	consumer, err := d.client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "my-sub"})
	if err != nil {
		return err
	}
	defer consumer.Close()
	if err := d.publish(topic, text("hello-0"), text("hello-1")); err != nil {
		return err
	}
	for i := range 2 {
		message, err := receive(consumer, wait)
		if err != nil {
			return err
		}
		if string(message.Payload()) != fmt.Sprintf("hello-%d", i) {
			return fmt.Errorf("received %s", message.Payload())
		}
		if err := consumer.Ack(message); err != nil {
			return err
		}
	}
	return nil
}

func (d *Driver) showChannel(topic string) error {
	channel := make(chan pulsar.ConsumerMessage, 10)
	consumer, err := d.client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "my-sub", Type: pulsar.Shared, MessageChannel: channel,
	})
	if err != nil {
		return err
	}
	defer consumer.Close()
	if err := d.publish(topic, text("heard")); err != nil {
		return err
	}
	select {
	case message := <-channel:
		return message.Ack(message)
	case <-time.After(wait):
		return fmt.Errorf("nothing came")
	}
}

func (d *Driver) showReader(topic string) error {
	if err := d.publish(topic, text("one"), text("two")); err != nil {
		return err
	}
	reader, err := d.client.CreateReader(pulsar.ReaderOptions{
		Topic: topic, StartMessageID: pulsar.EarliestMessageID(),
	})
	if err != nil {
		return err
	}
	defer reader.Close()
	found := []string{}
	for reader.HasNext() {
		message, err := reader.Next(context.Background())
		if err != nil {
			return err
		}
		found = append(found, string(message.Payload()))
	}
	if !reflect.DeepEqual(found, []string{"one", "two"}) {
		return fmt.Errorf("read %v", found)
	}
	if err := reader.SeekByTime(time.Now().Add(-time.Hour)); err != nil {
		return err
	}
	message, err := reader.Next(context.Background())
	if err == nil && string(message.Payload()) != "one" {
		return fmt.Errorf("read %s after the seek", message.Payload())
	}
	return err
}

func (d *Driver) showTableView(topic string) error {
	keyed := func(key, content string) *pulsar.ProducerMessage {
		return &pulsar.ProducerMessage{Key: key, Value: content}
	}
	if err := d.publishTyped(topic, pulsar.NewStringSchema(nil), keyed("k0", "old"), keyed("k1", "one"), keyed("k0", "new")); err != nil {
		return err
	}
	value := ""
	view, err := d.client.CreateTableView(pulsar.TableViewOptions{
		Topic: topic, Schema: pulsar.NewStringSchema(nil), SchemaValueType: reflect.TypeOf(&value),
	})
	if err != nil {
		return err
	}
	defer view.Close()
	if found, is := view.Get("k0").(*string); !is || *found != "new" || view.Size() != 2 {
		return fmt.Errorf("the view has %v", view.Entries())
	}
	return nil
}

func (d *Driver) showTopics(topic string) error {
	return d.both(topic, pulsar.ConsumerOptions{Topics: []string{prefix + topic + "-a", prefix + topic + "-b"}})
}

func (d *Driver) showPattern(topic string) error {
	for _, each := range []string{"a", "b"} {
		if err := d.publish(topic + "-" + each); err != nil {
			return err
		}
	}
	return d.both(topic, pulsar.ConsumerOptions{TopicsPattern: prefix + topic + "-.*"})
}

func (d *Driver) both(topic string, options pulsar.ConsumerOptions) error {
	options.SubscriptionName = "my-sub"
	options.SubscriptionInitialPosition = pulsar.SubscriptionPositionEarliest
	consumer, err := d.client.Subscribe(options)
	if err != nil {
		return err
	}
	defer consumer.Close()
	found := map[string]bool{}
	for _, each := range []string{"a", "b"} {
		if err := d.publish(topic+"-"+each, text(each)); err != nil {
			return err
		}
	}
	for range 2 {
		message, err := receive(consumer, wait)
		if err != nil {
			return err
		}
		found[string(message.Payload())] = true
	}
	if len(found) != 2 {
		return fmt.Errorf("received %v", found)
	}
	return nil
}
