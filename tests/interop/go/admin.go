package main

import (
	"fmt"

	"github.com/apache/pulsar-client-go/pulsaradmin"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
)

// Go's admin client: a namespace with policies, a partitioned topic in it, its statistics, and their end.
func (d *Driver) administer(command *Command) (Answer, error) {
	client, err := pulsaradmin.NewClient(&pulsaradmin.Config{WebServiceURL: command.URL})
	if err != nil {
		return nil, err
	}
	const namespace = "public/from-go"
	name, err := utils.GetTopicName("persistent://" + namespace + "/t")
	if err != nil {
		return nil, err
	}
	namespaces, topics := client.Namespaces(), client.Topics()
	if err := namespaces.CreateNamespace(namespace); err != nil {
		return nil, err
	}
	if err := namespaces.SetNamespaceMessageTTL(namespace, 3600); err != nil {
		return nil, err
	}
	if err := namespaces.SetRetention(namespace, utils.NewRetentionPolicies(10, 20)); err != nil {
		return nil, err
	}
	policies, err := namespaces.GetPolicies(namespace)
	if err != nil {
		return nil, err
	}
	if policies.MessageTTLInSeconds == nil || policies.RetentionPolicies == nil {
		return nil, fmt.Errorf("the policies are %v", policies)
	}
	if err := topics.Create(*name, 2); err != nil {
		return nil, err
	}
	if err := d.publish(name.String(), text("one"), text("two")); err != nil {
		return nil, err
	}
	stats, err := topics.GetPartitionedStats(*name, true)
	if err != nil {
		return nil, err
	}
	metadata, err := topics.GetMetadata(*name)
	if err != nil {
		return nil, err
	}
	listed, err := namespaces.GetTopics(namespace)
	if err != nil {
		return nil, err
	}
	if err := topics.Delete(*name, true, false); err != nil {
		return nil, err
	}
	return Answer{
		"ttl_s": *policies.MessageTTLInSeconds, "retention_minutes": policies.RetentionPolicies.RetentionTimeInMinutes,
		"stored": stats.StorageSize > 0, "with_stats": len(stats.Partitions), "partitions": metadata.Partitions, "topics": len(listed),
	}, namespaces.DeleteNamespace(namespace)
}
