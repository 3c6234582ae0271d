-- Mixture of experts: each token goes to the top_k experts that its gate likes best, at most `capacity` tokens of a
-- sample to each expert; what is beyond that is dropped and passes on as it is, through the residual connection around
-- the layer (Lepikhin et al. 2021, GShard; Fedus et al. 2022). Which tokens are dropped depends on the sample alone, so
-- it is the same on any number of ranks.
local M = require "dtrain.nn.module"
local init = require "dtrain.nn.initializer"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

local MoE = M.module("MoE")

--- nn.MoE{ width =, hidden = 4 * width, experts =, top_k = 1 or 2, capacity = 1.25 }: [B, T, width] -> [B, T, width],
--- and the loss that balances the experts as a second result (Fedus et al. 2022, equation 4): experts * sum over
--- experts of the share of tokens times the mean gate, 1 when all are used alike. capacity: how many times an even
--- share of a sample's tokens an expert takes.
function MoE:init(options)
  local o = util.options("nn.MoE", options, { { "width", "count", required = true }, { "hidden", "count" }, { "experts", "count",
    required = true }, { "top_k", "count", 1 }, { "capacity", "positive", 1.25 } })
  if o.top_k > 2 then util.fail("nn.MoE: top_k is 1 or 2, got %d", o.top_k) end
  if o.top_k > o.experts then util.fail("nn.MoE: top_k = %d, but there are %d experts", o.top_k, o.experts) end
  self.top_k, self.experts, self.capacity = o.top_k, o.experts, o.capacity
  local hidden = o.hidden or 4 * o.width
  self.gate = parameter.parameter({ o.experts, o.width }, init.normal(0, 0.02))
  self.up = parameter.parameter({ o.experts, o.width, hidden }, init.normal(0, o.width ^ -0.5))
  self.down = parameter.parameter({ o.experts, hidden, o.width }, init.normal(0, hidden ^ -0.5))
end

-- The places of tokens with an expert: mask [B, T, E] of those that chose it -> one-hot [B, T, E, room] of those that
-- find room, counting from `taken`, a number or [B, 1, E].
local function seats(mask, taken, room)
  local number = mask:cumsum(1) - mask + taken
  local fits = mask * number:lt(room):to(mask:dtype())
  local b, t, e = table.unpack(mask:shape())
  return ops.one_hot(ops.clamp(number, 0, room - 1):to "i64", room):to(mask:dtype()) * fits:reshape { b, t, e, 1 }
end

function MoE:forward(x)
  local b, t, c = table.unpack(x:shape())
  local e = self.experts
  local room = math.max(1, math.ceil(self.capacity * self.top_k * t / e))
  local gates = x:matmul(self.gate, { tb = true }):to "f32":softmax(-1)
  local first = ops.one_hot(gates:argmax(-1), e):to "f32"
  local balance = (first:mean { 0, 1 } * gates:mean { 0, 1 }):sum() * e
  local seat = seats(first, 0, room)
  local weight = seat * (gates * first):sum { dims = { 2 }, keepdim = true }:reshape { b, t, 1, 1 }
  if self.top_k == 2 then
    local second = ops.one_hot((gates * (1 - first)):argmax(-1), e):to "f32"
    local other = seats(second, first:sum { dims = { 1 }, keepdim = true }, room)
    local w1, w2 = (gates * first):sum { dims = { 2 }, keepdim = true }, (gates * second):sum { dims = { 2 }, keepdim = true }
    weight = (seat * (w1 / (w1 + w2)):reshape { b, t, 1, 1 }) + other * (w2 / (w1 + w2)):reshape { b, t, 1, 1 }
    seat = seat + other
  end
  -- [B, E room, T] x [B, T, C]: each expert's tokens of each sample; then experts first
  local sent = seat:to(x:dtype()):reshape { b, t, e * room }:matmul(x, { ta = true }):reshape { b, e, room, c }:permute { 1, 0, 2, 3 }
  local y = sent:reshape { e, b * room, c }:matmul(self.up):gelu():matmul(self.down)
  local back = y:reshape { e, b, room, c }:permute { 1, 0, 2, 3 }:reshape { b, e * room, c }
  return weight:to(x:dtype()):reshape { b, t, e * room }:matmul(back), balance
end

return MoE
