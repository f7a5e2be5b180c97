// A device in Go with paho.golang 0.23 (autopaho): sends a reading each second, ends at the command `stop`.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	"github.com/eclipse/paho.golang/paho"
)

func main() {
	ctx := context.Background()
	stop, stopOnce := make(chan struct{}), sync.Once{}
	name := cmp.Or(os.Getenv("MQTT_USER"), "device-1")
	address := cmp.Or(os.Getenv("MQTT_HOST"), "127.0.0.1") + ":" + cmp.Or(os.Getenv("MQTT_PORT"), "1883")
	config := autopaho.ClientConfig{
		ServerUrls:            []*url.URL{{Scheme: "mqtt", Host: address}},
		ConnectUsername:       name,
		ConnectPassword:       []byte(os.Getenv("MQTT_PASSWORD")),
		KeepAlive:             30,
		SessionExpiryInterval: 24 * 60 * 60, // s: the broker keeps commands as long
		ReconnectBackoff:      func(int) time.Duration { return time.Second },
		OnConnectError:        func(err error) { log.Print("not connected: ", err) },
		OnConnectionUp: func(manager *autopaho.ConnectionManager, connack *paho.Connack) {
			log.Print("connected, session present: ", connack.SessionPresent)
			if connack.SessionPresent {
				return
			}
			filters := []paho.SubscribeOptions{{Topic: "commands/" + name + "/#", QoS: 1}}
			if _, err := manager.Subscribe(ctx, &paho.Subscribe{Subscriptions: filters}); err != nil {
				log.Print("not subscribed: ", err)
			}
		},
		ClientConfig: paho.ClientConfig{
			ClientID: name,
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(got paho.PublishReceived) (bool, error) {
				log.Printf("command: %s %s", got.Packet.Topic, got.Packet.Payload)
				if string(got.Packet.Payload) == "stop" {
					stopOnce.Do(func() { close(stop) })
				}
				return true, nil
			}},
		},
	}
	if file := os.Getenv("MQTT_CA"); file != "" { // TLS, usually on port 8883
		pem, err := os.ReadFile(file)
		if err != nil {
			log.Fatal(err)
		}
		authorities := x509.NewCertPool()
		authorities.AppendCertsFromPEM(pem)
		config.ServerUrls[0].Scheme = "tls"
		config.TlsCfg = &tls.Config{RootCAs: authorities}
	}
	manager, err := autopaho.NewConnection(ctx, config)
	if err != nil {
		log.Fatal(err)
	}
	for stopping := false; !stopping; {
		select {
		case <-stop:
			stopping = true // after one more reading: then the command is acknowledged
		case <-time.After(time.Second):
		}
		reading, _ := json.Marshal(map[string]any{"ts": time.Now().UTC().Format(time.RFC3339), "value": 21.5})
		if err := publish(ctx, manager, "sensors/"+name+"/temperature", reading); err != nil {
			log.Print("refused: ", err)
		} else {
			fmt.Printf("stored: %s\n", reading)
		}
	}
	if err := manager.Disconnect(ctx); err != nil {
		log.Fatal(err)
	}
}

// publish returns when the message is acknowledged or refused. After a lost connection it sends the message again, which may
// then arrive twice.
func publish(ctx context.Context, manager *autopaho.ConnectionManager, topic string, payload []byte) error {
	for {
		if err := manager.AwaitConnection(ctx); err != nil {
			return err
		}
		answer, err := manager.Publish(ctx, &paho.Publish{Topic: topic, QoS: 1, Payload: payload})
		if err == nil || answer != nil {
			return err
		}
		log.Print("again: ", err)
	}
}
