-- Self-attention with one fused projection for queries, keys and values.
local activation = require "dtrain.nn.activation"
local Linear = require "dtrain.nn.linear"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local Attention = M.module("Attention")

-- the multiples of `heads` around `width`
local function near(width, heads)
  local low = width // heads * heads
  return low > 0 and ("%d or %d would"):format(low, low + heads) or ("%d would"):format(heads)
end

--- nn.Attention{ width =, heads =, kv_heads = heads, causal = true, rotary = false, theta = 10000, dropout = 0, bias
--- = true }: x[B, T, width] -> [B, T, width]. Grouped queries when kv_heads < heads (Ainslie et al. 2023); rotary
--- positions (Su et al. 2021); dropout acts on the result. init and proj_init: of the two weights; bias_init: of the
--- biases.
function Attention:init(options)
  local o = util.options("nn.Attention", options, {
    { "width", "count", required = true }, { "heads", "count", required = true }, { "kv_heads", "count" },
    { "causal", "boolean", true }, { "rotary", "boolean", false }, { "theta", "positive", 10000 },
    { "dropout", "fraction", 0 }, { "bias", "boolean", true },
    { "init", "table" }, { "proj_init", "table" }, { "bias_init", "table" } })
  local kv_heads = o.kv_heads or o.heads
  if o.width % o.heads ~= 0 then
    util.fail("width %d does not divide by heads %d; %s", o.width, o.heads, near(o.width, o.heads))
  end
  if o.heads % kv_heads ~= 0 then
    util.fail("nn.Attention: heads %d does not divide by kv_heads %d; use a divisor of %d", o.heads, kv_heads, o.heads)
  end
  local size = o.width // o.heads
  if o.rotary and size % 2 ~= 0 then
    util.fail("nn.Attention: rotary positions need an even head size, got width / heads = %d", size)
  end
  self.width, self.heads, self.kv_heads, self.size = o.width, o.heads, kv_heads, size
  self.causal, self.rotary, self.theta = o.causal, o.rotary, o.theta
  self.qkv = Linear(o.width, (o.heads + 2 * kv_heads) * size, { bias = o.bias, init = o.init, bias_init = o.bias_init })
  self.proj = Linear(o.width, o.width, { bias = o.bias, init = o.proj_init or o.init, bias_init = o.bias_init })
  if o.dropout > 0 then self.drop = activation.Dropout(o.dropout) end
end

function Attention:forward(x)
  local batch, time = x:size(0), x:size(1)
  local inner, kv = self.heads * self.size, self.kv_heads * self.size
  local q, k, v = ops.split(self.qkv(x), { inner, kv, kv }, -1)
  q = ops.reshape(q, { shape = { batch, time, self.heads, self.size } })
  k = ops.reshape(k, { shape = { batch, time, self.kv_heads, self.size } })
  v = ops.reshape(v, { shape = { batch, time, self.kv_heads, self.size } })
  if self.rotary then
    q = ops.rotary(q, { theta = self.theta, bthd = true })
    k = ops.rotary(k, { theta = self.theta, bthd = true })
  end
  local y = ops.attention(q, k, v, { causal = self.causal, bthd = true })
  y = self.proj(ops.reshape(y, { shape = { batch, time, inner } }))
  if self.drop then y = self.drop(y) end
  return y
end

function Attention:extra()
  local text = ("%d, heads = %d"):format(self.width, self.heads)
  if self.kv_heads ~= self.heads then text = text .. ", kv_heads = " .. self.kv_heads end
  return text .. (self.causal and ", causal" or "") .. (self.rotary and ", rotary" or "")
end

return Attention
