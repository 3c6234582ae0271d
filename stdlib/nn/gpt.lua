-- GPT: the decoder-only transformer of GPT-2 (Radford et al. 2019), pre-norm blocks, with a few modern options.
local activation = require "dtrain.nn.activation"
local Attention = require "dtrain.nn.attention"
local Embedding = require "dtrain.nn.embedding"
local init = require "dtrain.nn.initializer"
local Linear = require "dtrain.nn.linear"
local M = require "dtrain.nn.module"
local norms = require "dtrain.nn.norm"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local MLP, Block, GPT = M.module("MLP"), M.module("Block"), M.module("GPT")

function MLP:init(c)
  self.up = Linear(c.width, c.hidden, { bias = c.bias, init = c.init, bias_init = init.zeros() })
  self.down = Linear(c.hidden, c.width, { bias = c.bias, init = c.proj_init, bias_init = init.zeros() })
  if c.dropout > 0 then self.drop = activation.Dropout(c.dropout) end
end

function MLP:forward(x)
  local y = self.down(ops.gelu_tanh(self.up(x)))
  if self.drop then y = self.drop(y) end
  return y
end

local function norm(c)
  if c.norm == "rms" then return norms.RMSNorm(c.width) end
  return norms.LayerNorm(c.width, { bias = c.bias })
end

function Block:init(c)
  self.norm1 = norm(c)
  self.attn = Attention { width = c.width, heads = c.heads, kv_heads = c.kv_heads, causal = true, bias = c.bias,
    rotary = c.positions == "rotary", theta = c.theta, dropout = c.dropout, init = c.init, proj_init = c.proj_init,
    bias_init = init.zeros() }
  self.norm2 = norm(c)
  self.mlp = MLP(c)
end

function Block:forward(x)
  x = x + self.attn(self.norm1(x))
  return x + self.mlp(self.norm2(x))
end

--- nn.GPT{ vocab =, layers =, heads =, width =, context =, tied = true, positions = "learned" | "rotary", dropout = 0,
--- norm = "layer" | "rms", bias = true, kv_heads = heads, hidden = 4 * width, theta = 10000 }: ids[B, T] -> logits[B,
--- T, vocab], T up to context. Weights begin normal(0, 0.02), the projections that end a residual branch divided by
--- sqrt(2 layers), biases zero. tied: the output layer is the embedding's weight.
function GPT:init(options)
  local c = util.options("nn.GPT", options, {
    { "vocab", "count", required = true }, { "layers", "count", required = true },
      { "heads", "count", required = true },
    { "width", "count", required = true }, { "context", "count", required = true }, { "tied", "boolean", true },
    { "positions", "string", "learned", choices = { "learned", "rotary" } }, { "dropout", "fraction", 0 },
    { "norm", "string", "layer", choices = { "layer", "rms" } }, { "bias", "boolean", true }, { "kv_heads", "count" },
    { "hidden", "count" }, { "theta", "positive", 10000 } })
  c.hidden = c.hidden or 4 * c.width
  c.init, c.proj_init = init.normal(0, 0.02), init.normal(0, 0.02 / math.sqrt(2 * c.layers))
  self.vocab, self.context, self.layers, self.tied = c.vocab, c.context, c.layers, c.tied
  self.wte = Embedding(c.vocab, c.width, { init = c.init })
  if c.positions == "learned" then self.wpe = Embedding(c.context, c.width, { init = c.init }) end
  if c.dropout > 0 then self.drop = activation.Dropout(c.dropout) end
  local blocks = {}
  for i = 1, c.layers do blocks[i] = Block(c) end
  self.blocks = blocks
  self.norm = norm(c)
  if not c.tied then self.head = Linear(c.width, c.vocab, { bias = false, init = c.init }) end
end

function GPT:forward(ids)
  local time = ids:size(-1)
  if time > self.context then
    util.fail("the sequence has %d tokens, the model's context is %d; shorten it or raise context", time, self.context)
  end
  local x = self.wte(ids)
  if self.wpe then
    local places = self.wpe.weight
    if time < self.context then places = ops.slice(places, { dim = 0, start = 0, stop = time }) end
    x = x + places
  end
  if self.drop then x = self.drop(x) end
  for _, block in ipairs(self.blocks) do x = block(x) end
  x = self.norm(x)
  if self.tied then return ops.linear(x, self.wte.weight) end
  return self.head(x)
end

return GPT
