-- dt.generate: text from a model of bytes, one at a time, by running its forward on the last `context` bytes.
local core = require "dtrain.core"
local util = require "dtrain.util"

-- A small generator of numbers in [0, 1) with its own state (xorshift64*), so that a text depends on its seed alone.
local function uniform(seed)
  local x = (seed * 0x9E3779B97F4A7C15) ~ 0x2545F4914F6CDD1D
  if x == 0 then x = 1 end
  return function()
    x = x ~ (x >> 12)
    x = x ~ (x << 25)
    x = x ~ (x >> 27)
    return ((x * 0x2545F4914F6CDD1D) >> 11) / (1 << 53)
  end
end

-- Index (from 1) drawn from logits at a temperature among the top_k largest; temperature 0: the largest.
local function draw(logits, temperature, top_k, random)
  local best = 1
  for i = 2, #logits do if logits[i] > logits[best] then best = i end end
  if temperature == 0 then return best end
  local floor = -math.huge
  if top_k and top_k < #logits then
    local sorted = table.move(logits, 1, #logits, 1, {})
    table.sort(sorted, function(a, b) return a > b end)
    floor = sorted[top_k]
  end
  local total, weights = 0, {}
  for i, l in ipairs(logits) do
    weights[i] = l >= floor and math.exp((l - logits[best]) / temperature) or 0
    total = total + weights[i]
  end
  local at = random() * total
  for i, w in ipairs(weights) do
    at = at - w
    if at < 0 then return i end
  end
  return best
end

--- dt.generate(model, { prompt = text, count = 200, temperature = 0.8 (0: greedy), top_k =, seed = 0, context =
--- model.context, stop = a byte at which to end }) -> prompt and continuation. The model maps ids [1, T] to logits
--- [1, T, 256]; the forward always runs at the fixed length `context`, so that it is planned once.
return function(model, options)
  local o = util.options("dt.generate", options, { { "prompt", "string", "\n" }, { "count", "count", 200 },
    { "temperature", "nonnegative", 0.8 }, { "top_k", "count" }, { "seed", "integer", 0 }, { "context", "count" },
    { "stop", "string" } })
  local context = o.context or model.context
  if not context then util.fail("dt.generate: the model has no context; give context = number of tokens it reads") end
  if o.prompt == "" then util.fail("dt.generate: the prompt is empty; give at least one character") end
  local random = uniform(o.seed)
  local bytes = { o.prompt:byte(1, -1) }
  for _ = 1, o.count do
    local first = math.max(1, #bytes - context + 1)
    local window = table.move(bytes, first, #bytes, 1, {})
    local last = #window
    for i = last + 1, context do window[i] = 0 end -- what follows is never looked at: attention is causal
    local logits = model(core.tensor({ window }, "i64"))
    local row = logits:slice { dim = 1, start = last - 1, stop = last }:reshape { -1 }:totable()
    bytes[#bytes + 1] = draw(row, o.temperature, o.top_k, random) - 1
    if o.stop and bytes[#bytes] == o.stop:byte() then break end
  end
  local out = {}
  for i = 1, #bytes, 4096 do out[#out + 1] = string.char(table.unpack(bytes, i, math.min(i + 4095, #bytes))) end
  return table.concat(out)
end
