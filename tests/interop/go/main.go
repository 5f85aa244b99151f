// A driver of pulsar-client-go: `go-driver URL`. It reads a command of JSON from each line of stdin and prints its
// answer as one line, as tests/interop/drivers.py says.
package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/crypto"
	"github.com/apache/pulsar-client-go/pulsar/log"
)

const (
	wait    = 20 * time.Second
	keyName = "interop"
	long    = 1000
	order   = `{"type":"record","name":"Order","fields":[{"name":"a","type":"int"},` +
		`{"name":"b","type":["null","string"],"default":null}]}`
)

type Order struct {
	A int     `json:"a" avro:"a"`
	B *string `json:"b" avro:"b"`
}

type Message struct {
	Text           string            `json:"text"`
	Times          int               `json:"times"`
	Key            string            `json:"key"`
	OrderingKey    string            `json:"ordering_key"`
	Properties     map[string]string `json:"properties"`
	EventTime      int64             `json:"event_time"`
	DeliverAfterMs int64             `json:"deliver_after_ms"`
}

type Command struct {
	Do           string    `json:"do"`
	Topic        string    `json:"topic"`
	Subscription string    `json:"subscription"`
	Type         string    `json:"type"`
	Letters      string    `json:"letters"`
	Count        int       `json:"count"`
	Messages     []Message `json:"messages"`
	Batching     bool      `json:"batching"`
	Chunking     bool      `json:"chunking"`
	Compression  string    `json:"compression"`
	Keys         []string  `json:"keys"`
	Schema       string    `json:"schema"`
	Texts        []string  `json:"texts"`
	URL          string    `json:"url"`
	ByIndex      bool      `json:"by_index"`
}

type Answer map[string]any

type Driver struct {
	client   pulsar.Client
	producer pulsar.Producer
	consumer pulsar.Consumer
}

var compressions = map[string]pulsar.CompressionType{
	"": pulsar.NoCompression, "LZ4": pulsar.LZ4, "ZLib": pulsar.ZLib, "ZSTD": pulsar.ZSTD, "SNAPPY": pulsar.SNAPPY,
}

var types = map[string]pulsar.SubscriptionType{
	"Exclusive": pulsar.Exclusive, "Shared": pulsar.Shared, "Failover": pulsar.Failover, "KeyShared": pulsar.KeyShared,
}

func schemaOf(name string) pulsar.Schema {
	switch name {
	case "JSON":
		return pulsar.NewJSONSchema(order, nil)
	case "AVRO":
		return pulsar.NewAvroSchema(order, nil)
	case "STRING":
		return pulsar.NewStringSchema(nil)
	}
	return nil
}

func (command *Command) put(message *pulsar.ProducerMessage, text string) {
	switch command.Schema {
	case "":
		message.Payload = []byte(text)
	case "STRING":
		message.Value = text
	default:
		message.Value = &Order{A: len(text), B: &text}
	}
}

func (d *Driver) produce(command *Command) (Answer, error) {
	options := pulsar.ProducerOptions{
		Topic: command.Topic, DisableBatching: !command.Batching, BatchingMaxPublishDelay: 50 * time.Millisecond,
		EnableChunking: command.Chunking, CompressionType: compressions[command.Compression],
		Schema: schemaOf(command.Schema),
	}
	if command.Keys != nil {
		options.Encryption = &pulsar.ProducerEncryptionInfo{
			KeyReader: crypto.NewFileKeyReader(command.Keys[0], command.Keys[1]), Keys: []string{keyName},
		}
	}
	producer, err := d.client.CreateProducer(options)
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	var waiting sync.WaitGroup
	failed := make(chan error, len(command.Messages))
	for _, each := range command.Messages {
		message := &pulsar.ProducerMessage{Key: each.Key, OrderingKey: each.OrderingKey, Properties: each.Properties}
		text := strings.Repeat(each.Text, max(each.Times, 1))
		command.put(message, text)
		if each.EventTime != 0 {
			message.EventTime = time.UnixMilli(each.EventTime)
		}
		message.DeliverAfter = time.Duration(each.DeliverAfterMs) * time.Millisecond
		waiting.Add(1)
		producer.SendAsync(context.Background(), message, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
			if err != nil {
				failed <- err
			}
			waiting.Done()
		})
	}
	if err := producer.Flush(); err != nil {
		return nil, err
	}
	waiting.Wait()
	if len(failed) > 0 {
		return nil, <-failed
	}
	return Answer{"sent": len(command.Messages)}, nil
}

func (d *Driver) subscribe(command *Command, dlq *pulsar.DLQPolicy) (pulsar.Consumer, error) {
	options := pulsar.ConsumerOptions{
		Topic: command.Topic, SubscriptionName: command.Subscription, Type: types[command.Type],
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, DLQ: dlq,
		NackRedeliveryDelay: 100 * time.Millisecond, Schema: schemaOf(command.Schema),
	}
	if command.Keys != nil {
		reader := crypto.NewFileKeyReader(command.Keys[0], command.Keys[1])
		options.Decryption = &pulsar.MessageDecryptionInfo{KeyReader: reader}
	}
	if command.ByIndex {
		options.EnableBatchIndexAcknowledgment = true
		options.Properties = map[string]string{"magnetar.index_acks": "true"}
	}
	return d.client.Subscribe(options)
}

func receive(consumer pulsar.Consumer, timeout time.Duration) (pulsar.Message, error) {
	within, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return consumer.Receive(within)
}

func (command *Command) described(message pulsar.Message) (Answer, error) {
	content := message.Payload()
	if command.Schema == "JSON" || command.Schema == "AVRO" {
		var value Order
		if err := message.GetSchemaValue(&value); err != nil {
			return nil, err
		}
		if value.B == nil || value.A != len(*value.B) {
			return nil, fmt.Errorf("a value that was not sent: %v", value)
		}
		content = []byte(*value.B)
	}
	text := string(content)
	if len(content) >= long {
		hash := sha256.Sum256(content)
		text = hex.EncodeToString(hash[:])
	}
	eventTime := int64(0)
	if !message.EventTime().IsZero() {
		eventTime = message.EventTime().UnixMilli()
	}
	properties := message.Properties()
	if properties == nil {
		properties = map[string]string{}
	}
	return Answer{
		"text": text, "key": message.Key(), "ordering_key": message.OrderingKey(), "properties": properties,
		"event_time": max(eventTime, 0), "batch_index": message.ID().BatchIdx(),
		"age_ms": time.Since(message.PublishTime()).Milliseconds(),
	}, nil
}

func (d *Driver) consume(command *Command) (Answer, error) {
	consumer, err := d.subscribe(command, nil)
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	found := []Answer{}
	for range command.Count {
		message, err := receive(consumer, wait)
		if err != nil {
			return nil, err
		}
		described, err := command.described(message)
		if err != nil {
			return nil, err
		}
		found = append(found, described)
		if err := consumer.Ack(message); err != nil {
			return nil, err
		}
	}
	return Answer{"messages": found}, nil
}

func (d *Driver) deadLetter(command *Command) (Answer, error) {
	check := *command
	check.Topic, check.Subscription = command.Letters, "check"
	letters, err := d.subscribe(&check, nil)
	if err != nil {
		return nil, err
	}
	defer letters.Close()
	consumer, err := d.subscribe(command, &pulsar.DLQPolicy{MaxDeliveries: 2, DeadLetterTopic: command.Letters})
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	for range 2 * command.Count {
		message, err := receive(consumer, wait)
		if err != nil {
			return nil, err
		}
		consumer.Nack(message)
	}
	found := []string{}
	for range command.Count {
		message, err := receive(letters, wait)
		if err != nil {
			return nil, err
		}
		found = append(found, string(message.Payload()))
	}
	return Answer{"letters": found}, nil
}

func (d *Driver) open(command *Command) (Answer, error) {
	var err error
	if d.producer, err = d.client.CreateProducer(pulsar.ProducerOptions{Topic: command.Topic}); err != nil {
		return nil, err
	}
	d.consumer, err = d.subscribe(command, nil)
	return Answer{}, err
}

func (d *Driver) send(command *Command) (Answer, error) {
	for _, text := range command.Texts {
		if _, err := d.producer.Send(context.Background(), &pulsar.ProducerMessage{Payload: []byte(text)}); err != nil {
			return nil, err
		}
	}
	return Answer{}, nil
}

// Until all of these texts came; what was acknowledged before may come again.
func (d *Driver) receive(command *Command) (Answer, error) {
	missing, came := map[string]bool{}, []string{}
	for _, text := range command.Texts {
		missing[text] = true
	}
	for len(missing) > 0 {
		message, err := receive(d.consumer, wait)
		if err != nil {
			return nil, err
		}
		came = append(came, string(message.Payload()))
		if err := d.consumer.Ack(message); err != nil {
			return nil, err
		}
		delete(missing, string(message.Payload()))
	}
	return Answer{"came": came}, nil
}

func (d *Driver) do(command *Command) (answer Answer, err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("panic: %v", panicked)
		}
	}()
	switch command.Do {
	case "produce":
		return d.produce(command)
	case "consume":
		return d.consume(command)
	case "dead_letter":
		return d.deadLetter(command)
	case "open":
		return d.open(command)
	case "send":
		return d.send(command)
	case "receive":
		return d.receive(command)
	case "administer":
		return d.administer(command)
	case "examples":
		return d.examples(command)
	}
	return nil, fmt.Errorf("no command %q", command.Do)
}

func main() {
	quiet := log.NewLoggerWithSlog(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1], Logger: quiet})
	if err != nil {
		panic(err)
	}
	driver, lines := &Driver{client: client}, bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		command := &Command{}
		var answer Answer
		if err = json.Unmarshal(line, command); err == nil {
			answer, err = driver.do(command)
		}
		if err != nil {
			answer = Answer{"error": err.Error()}
		}
		printed, _ := json.Marshal(answer)
		fmt.Println(string(printed))
	}
}
