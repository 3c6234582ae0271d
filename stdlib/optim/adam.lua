-- Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), as torch.optim.Adam and AdamW.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"

local function states(h)
  return h.amsgrad and { "m", "v", "vmax" } or { "m", "v" }
end

local function step(p, g, s, h)
  local b1, b2 = h.betas[1], h.betas[2]
  s.m = s.m + (g - s.m) * (1 - b1)
  s.v = s.v * b2 + ops.square(g) * (1 - b2)
  local v = s.v
  if h.amsgrad then
    s.vmax = ops.maximum(s.vmax, v)
    v = s.vmax
  end
  local size = h.lr / (1 - b1 ^ h.t)
  local root = ops.sqrt(1 - b2 ^ h.t)
  return p - s.m / (ops.sqrt(v) / root + h.eps) * size
end

local kinds = { betas = "decay", eps = "nonnegative", weight_decay = "nonnegative" }
local defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, amsgrad = false }

local Adam = define {
  name = "Adam",
  defaults = defaults,
  kinds = kinds,
  state = states,
  update = function(p, g, s, h)
    if h.weight_decay ~= 0 then g = g + p * h.weight_decay end -- L2: part of the gradient
    return step(p, g, s, h)
  end,
}

local AdamW = define {
  name = "AdamW",
  defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0.01, amsgrad = false },
  kinds = kinds,
  state = states,
  update = function(p, g, s, h)
    if h.weight_decay ~= 0 then p = p * (1 - h.lr * h.weight_decay) end -- decoupled
    return step(p, g, s, h)
  end,
}

--- optim.Adam{ lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, amsgrad = false }; AdamW:
--- weight_decay = 0.01
return { Adam = Adam, AdamW = AdamW }
