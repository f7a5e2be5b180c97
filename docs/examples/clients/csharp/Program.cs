// A device in C# (.NET 8) with MQTTnet 5: sends a reading each second, ends at the command `stop`.

using System.Security.Cryptography.X509Certificates;
using System.Text.Json;
using MQTTnet;
using MQTTnet.Exceptions;
using MQTTnet.Formatter;
using MQTTnet.Protocol;

string Setting(string name, string otherwise) => Environment.GetEnvironmentVariable(name) ?? otherwise;

var name = Setting("MQTT_USER", "device-1");
var builder = new MqttClientOptionsBuilder()
    .WithTcpServer(Setting("MQTT_HOST", "127.0.0.1"), int.Parse(Setting("MQTT_PORT", "1883")))
    .WithProtocolVersion(MqttProtocolVersion.V500)
    .WithClientId(name)
    .WithCredentials(name, Setting("MQTT_PASSWORD", ""))
    .WithCleanStart(false)
    .WithSessionExpiryInterval(24 * 60 * 60)  // s: the broker keeps commands as long
    .WithKeepAlivePeriod(TimeSpan.FromSeconds(30));
if (Setting("MQTT_CA", "") is { Length: > 0 } file)  // TLS, usually on port 8883
{
    var authorities = new X509Certificate2Collection();
    authorities.ImportFromPemFile(file);
    builder.WithTlsOptions(tls => tls.UseTls().WithTrustChain(authorities));
}
var options = builder.Build();

using var client = new MqttClientFactory().CreateMqttClient();
var stopped = new TaskCompletionSource();
client.ApplicationMessageReceivedAsync += async received =>
{
    var payload = received.ApplicationMessage.ConvertPayloadToString();
    Console.WriteLine($"command: {received.ApplicationMessage.Topic} {payload}");
    received.AutoAcknowledge = false;
    await received.AcknowledgeAsync(CancellationToken.None);  // it is done: the broker need not send it again
    if (payload == "stop") stopped.TrySetResult();
};

string? reading = null;
while (!stopped.Task.IsCompleted)
{
    try
    {
        if (!client.IsConnected)
        {
            var connack = await client.ConnectAsync(options);
            if (connack.ResultCode != MqttClientConnectResultCode.Success)
                throw new MqttCommunicationException(connack.ResultCode.ToString());
            Console.WriteLine($"connected, session present: {connack.IsSessionPresent}");
            if (!connack.IsSessionPresent)
                await client.SubscribeAsync($"commands/{name}/#", MqttQualityOfServiceLevel.AtLeastOnce);
        }
        reading ??= JsonSerializer.Serialize(new { ts = DateTime.UtcNow, value = 21.5 });
        // Returns with the acknowledgement. After an error the next turn connects, and sends the reading again.
        var puback = await client.PublishStringAsync($"sensors/{name}/temperature", reading, MqttQualityOfServiceLevel.AtLeastOnce);
        Console.WriteLine(puback.IsSuccess ? $"stored: {reading}" : $"refused, {puback.ReasonCode}: {reading}");
        reading = null;
    }
    catch (Exception error) when (error is MqttCommunicationException or OperationCanceledException)
    {
        Console.WriteLine($"not connected: {error.Message}");
    }
    await Task.WhenAny(stopped.Task, Task.Delay(1000));
}
await client.DisconnectAsync();
