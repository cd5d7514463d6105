"""Call a tool with the openai client: the model chooses arguments, the program runs the tool, the model answers.

The included model has learned no tools. So the server gets a chat template with tools, and `tool_choice` is "required":
a grammar forces a valid call. Its answer is Python, since it writes nothing else. Models that know tools need neither.
Needs the extra `serve`, and `pip install openai`. Run it in the folder of the repository:

    python examples/serve_tool.py                                    (starts a server of the included model)
    python examples/serve_tool.py --url http://127.0.0.1:8000        (uses yours)
"""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

WEATHER = {"Oslo": "7 degrees", "Rome": "21 degrees"}
CITY = {"type": "object", "properties": {"city": {"enum": list(WEATHER)}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {**CITY, "additionalProperties": False}}}


def converse(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    model = client.models.list().data[0].id
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], **choice).choices[0].message
    [call] = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = WEATHER[arguments["city"]]
    print(f"{call.function.name}({json.dumps(arguments)}) returned {result}")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=64)
    print(f"answer: {answer.choices[0].message.content}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="address of a running server")
    url, server = parser.parse_args().url, None
    if url is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        template = Path(__file__).with_name("tools.jinja")
        command = [sys.executable, "-m", "eagle_mlx.serve.api.cli", "--port", str(port)]  # eagle-serve
        server = subprocess.Popen([*command, "--target", "checkpoints/target", "--chat-template", str(template)])
    try:
        converse(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10))  # it retries while the model loads
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
