/* The Paho C client behind the line protocol of client.py's Program: one connection, commands on standard input. */
#include <MQTTClient.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define MAX_FIELDS 32
#define MAX_LINE 4096

static MQTTClient client;
static int version;
static char *names[MAX_FIELDS], *values[MAX_FIELDS];
static int fields;

static void split(char *line)
{
    fields = 0;
    line[strcspn(line, "\n")] = '\0';
    char *rest = line;
    strsep(&rest, "\t");
    while (rest != NULL && fields < MAX_FIELDS) {
        char *value = strsep(&rest, "\t");
        names[fields] = strsep(&value, "=");
        values[fields++] = value == NULL ? "" : value;
    }
}

static char *field(const char *name)
{
    for (int i = 0; i < fields; i++)
        if (strcmp(names[i], name) == 0)
            return values[i];
    return "";
}

static int number(const char *name)
{
    return atoi(field(name));
}

static void check(const char *what, int code)
{
    if (code == 0)
        return;
    printf("error\ttext=%s gave %d\n", what, code);
    exit(1);
}

static void add_text(MQTTProperties *properties, enum MQTTPropertyCodes id, char *name, char *value)
{
    MQTTProperty property = {.identifier = id};
    property.value.data = (MQTTLenString){(int)strlen(name), name};
    property.value.value = (MQTTLenString){(int)strlen(value), value};
    check("MQTTProperties_add", MQTTProperties_add(properties, &property));
}

static void add_number(MQTTProperties *properties, enum MQTTPropertyCodes id, int value)
{
    MQTTProperty property = {.identifier = id};
    property.value.integer4 = (unsigned int)value;
    check("MQTTProperties_add", MQTTProperties_add(properties, &property));
}

static void say_text(const char *name, MQTTLenString text)
{
    printf("\t%s=%.*s", name, text.len, text.data);
}

static void say_property(const MQTTProperty *property)
{
    switch (property->identifier) {
    case MQTTPROPERTY_CODE_USER_PROPERTY:
        say_text("user", property->value.data);
        printf("=%.*s", property->value.value.len, property->value.value.data);
        break;
    case MQTTPROPERTY_CODE_RESPONSE_TOPIC:
        say_text("response", property->value.data);
        break;
    case MQTTPROPERTY_CODE_CORRELATION_DATA:
        say_text("correlation", property->value.data);
        break;
    case MQTTPROPERTY_CODE_CONTENT_TYPE:
        say_text("type", property->value.data);
        break;
    case MQTTPROPERTY_CODE_MESSAGE_EXPIRY_INTERVAL:
        printf("\texpiry=%u", property->value.integer4);
        break;
    case MQTTPROPERTY_CODE_SUBSCRIPTION_IDENTIFIER:
        printf("\tidentifier=%u", property->value.integer4);
        break;
    default:
        break;
    }
}

static int on_message(void *context, char *topic, int topic_length, MQTTClient_message *message)
{
    (void)context;
    (void)topic_length;
    flockfile(stdout);
    printf("message\ttopic=%s\tpayload=%.*s\tqos=%d\tretain=%d", topic, message->payloadlen, (char *)message->payload,
           message->qos, message->retained);
    for (int i = 0; i < message->properties.count; i++)
        say_property(&message->properties.array[i]);
    printf("\n");
    funlockfile(stdout);
    MQTTClient_freeMessage(&message);
    MQTTClient_free(topic);
    return 1;
}

static void connect_client(void)
{
    version = number("version");
    MQTTClient_createOptions create = MQTTClient_createOptions_initializer;
    create.MQTTVersion = version;
    int persistence = MQTTCLIENT_PERSISTENCE_NONE;
    check("create", MQTTClient_createWithOptions(&client, field("url"), field("id"), persistence, NULL, &create));
    check("setCallbacks", MQTTClient_setCallbacks(client, NULL, NULL, on_message, NULL));
    MQTTClient_willOptions will = MQTTClient_willOptions_initializer;
    will.topicName = field("will");
    will.message = field("payload");
    will.qos = number("qos");
    MQTTClient_connectOptions three = MQTTClient_connectOptions_initializer;
    MQTTClient_connectOptions five = MQTTClient_connectOptions_initializer5;
    MQTTClient_connectOptions *options = version == 5 ? &five : &three;
    options->MQTTVersion = version;
    options->will = *field("will") ? &will : NULL;
    if (version == 5) {
        MQTTProperties properties = MQTTProperties_initializer;
        add_number(&properties, MQTTPROPERTY_CODE_SESSION_EXPIRY_INTERVAL, number("expiry"));
        options->cleanstart = number("clean");
        MQTTResponse response = MQTTClient_connect5(client, options, &properties, NULL);
        check("connect", (int)response.reasonCode);
        MQTTResponse_free(response);
        MQTTProperties_free(&properties);
        /* The library says whether a session was present for 3.1.1 only. */
        printf("connected\n");
    } else {
        options->cleansession = number("clean");
        check("connect", MQTTClient_connect(client, options));
        printf("connected\tsession=%d\n", options->returned.sessionPresent);
    }
}

static void subscribe(void)
{
    if (version == 5) {
        MQTTProperties properties = MQTTProperties_initializer;
        if (*field("identifier"))
            add_number(&properties, MQTTPROPERTY_CODE_SUBSCRIPTION_IDENTIFIER, number("identifier"));
        MQTTResponse response = MQTTClient_subscribe5(client, field("filter"), number("qos"), NULL, &properties);
        printf("subscribed\tcode=%d\n", (int)response.reasonCode);
        MQTTResponse_free(response);
        MQTTProperties_free(&properties);
    } else {
        /* The library turns a refusal into an error and grants nothing less than was asked. */
        check("subscribe", MQTTClient_subscribe(client, field("filter"), number("qos")));
        printf("subscribed\tcode=%d\n", number("qos"));
    }
}

static void add_publish_properties(MQTTProperties *properties)
{
    for (int i = 0; i < fields; i++) {
        char *value = values[i];
        if (strcmp(names[i], "user") == 0) {
            char *name = strsep(&value, "=");
            add_text(properties, MQTTPROPERTY_CODE_USER_PROPERTY, name, value);
        } else if (strcmp(names[i], "response") == 0) {
            add_text(properties, MQTTPROPERTY_CODE_RESPONSE_TOPIC, value, "");
        } else if (strcmp(names[i], "correlation") == 0) {
            add_text(properties, MQTTPROPERTY_CODE_CORRELATION_DATA, value, "");
        } else if (strcmp(names[i], "type") == 0) {
            add_text(properties, MQTTPROPERTY_CODE_CONTENT_TYPE, value, "");
        } else if (strcmp(names[i], "expiry") == 0) {
            add_number(properties, MQTTPROPERTY_CODE_MESSAGE_EXPIRY_INTERVAL, atoi(value));
        }
    }
}

static void publish(void)
{
    MQTTClient_message message = MQTTClient_message_initializer;
    MQTTClient_deliveryToken token = 0;
    message.payload = field("payload");
    message.payloadlen = (int)strlen(field("payload"));
    message.qos = number("qos");
    message.retained = number("retain");
    if (version == 5) {
        add_publish_properties(&message.properties);
        MQTTResponse response = MQTTClient_publishMessage5(client, field("topic"), &message, &token);
        check("publish", (int)response.reasonCode);
        MQTTResponse_free(response);
        MQTTProperties_free(&message.properties);
    } else {
        check("publish", MQTTClient_publishMessage(client, field("topic"), &message, &token));
    }
    if (message.qos > 0)
        check("waitForCompletion", MQTTClient_waitForCompletion(client, token, TIMEOUT_MS));
    printf("published\n");
}

static void disconnect_client(void)
{
    if (version == 5)
        MQTTClient_disconnect5(client, TIMEOUT_MS, MQTTREASONCODE_SUCCESS, NULL);
    else
        MQTTClient_disconnect(client, TIMEOUT_MS);
    printf("disconnected\n");
}

int main(void)
{
    static char line[MAX_LINE];

    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL) {
        char word = line[0];
        split(line);
        if (word == 'c')
            connect_client();
        else if (word == 's')
            subscribe();
        else if (word == 'p')
            publish();
        else
            disconnect_client();
    }
    MQTTClient_destroy(&client);
    return 0;
}
