{{/*
What the pod of `helm test` runs: ready, one completion, one stream. Of Python's own
library only, so that it runs in any image that has Python. Arguments: URL, seconds to wait for each
answer, and a file of API keys where there are any.
*/}}
{{- define "baton.testScript" -}}
import json, sys, time, urllib.request

url, patience_s = sys.argv[1], float(sys.argv[2])
headers = {"content-type": "application/json"}
if len(sys.argv) > 3:
    headers["authorization"] = "Bearer " + open(sys.argv[3]).readline().strip()

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    return urllib.request.urlopen(request, timeout=patience_s)

def wait_ready():
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask("/ready").read()
        except OSError as error:  # no connection, or a status that is no success
            if time.monotonic() > deadline:
                raise SystemExit(f"not ready within {patience_s:.0f} s: {error}")
            time.sleep(1)

wait_ready()
model = json.load(ask("/v1/models"))["data"][0]["id"]
print(f"ready, with {model}")

body = {"model": model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
whole = json.load(ask("/v1/completions", body))["choices"][0]
print(f"one completion: {whole['text']!r}, {whole['finish_reason']}")

text, finish, last = "", None, None
for line in ask("/v1/completions", body | {"stream": True}):
    if line.startswith(b"data: "):
        last = line.removeprefix(b"data: ").strip()
        if last != b"[DONE]":
            event = json.loads(last)
            if "error" in event:
                raise SystemExit(f"the stream ends by an error: {event['error']}")
            for choice in event["choices"]:
                text, finish = text + choice["text"], choice["finish_reason"] or finish
print(f"one stream: {text!r}, {finish}")
if last != b"[DONE]" or not finish:
    raise SystemExit("the stream does not end as it should")
{{- end -}}
