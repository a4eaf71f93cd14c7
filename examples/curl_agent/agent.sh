#!/bin/bash
# Asks the policy twice about one task; the reward is higher for a shorter second reply.
set -euo pipefail
task=$(cat)  # {"id": ..., "question": ..., "metadata": {...}, "sample": ...}

ask() {  # takes messages as JSON, prints the policy's reply
  jq -n --argjson messages "$1" '{model: "policy", max_tokens: 24, messages: $messages}' |
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -d @- \
      -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" |
    jq -r '.choices[0].message.content'
}

messages=$(jq '[{role: "user", content: .question}]' <<<"$task")
draft=$(ask "$messages")
messages=$(jq --arg draft "$draft" '. + [{role: "assistant", content: $draft},
  {role: "user", content: "Say it in one word."}]' <<<"$messages")
answer=$(ask "$messages")
# The last line that a program prints is its outcome.
jq -cn --arg answer "$answer" '{answer: $answer, reward: (1 / ($answer | split(" ") | length))}'
