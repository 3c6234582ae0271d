-- Activations, Dropout, Flatten and Identity as modules.
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local activation = {}

-- Modules without arguments: one op each.
for _, row in ipairs { { "ReLU", "relu" }, { "SiLU", "silu" }, { "Tanh", "tanh" }, { "Sigmoid", "sigmoid" },
  { "Softplus", "softplus" }, { "Hardswish", "hardswish" }, { "Mish", "mish" } } do
  local name, op = row[1], row[2]
  local class = M.module(name)
  function class.init(_, ...)
    if select("#", ...) > 0 then util.fail("nn.%s takes no arguments", name) end
  end
  function class.forward(_, x) return ops[op](x) end
  function class.extra() return "" end
  activation[name] = class
end

activation.GELU = M.module("GELU")

--- nn.GELU{ approximate = "none" | "tanh" } (Hendrycks and Gimpel 2016); "none" is the exact form.
function activation.GELU:init(options)
  local o = util.options("nn.GELU", options, { { "approximate", "string", "none", choices = { "none", "tanh" } } })
  self.approximate = o.approximate
end
function activation.GELU:forward(x) return ops.gelu(x, self.approximate) end
function activation.GELU:extra() return self.approximate == "tanh" and "tanh" or "" end

activation.LeakyReLU = M.module("LeakyReLU")

--- nn.LeakyReLU(slope = 0.01)
function activation.LeakyReLU:init(slope) self.slope = util.check("nn.LeakyReLU: slope", slope or 0.01, "number") end
function activation.LeakyReLU:forward(x) return ops.leaky_relu(x, self.slope) end
function activation.LeakyReLU:extra() return ("%g"):format(self.slope) end

activation.ELU = M.module("ELU")

--- nn.ELU(alpha = 1)
function activation.ELU:init(alpha) self.alpha = util.check("nn.ELU: alpha", alpha or 1, "number") end
function activation.ELU:forward(x) return ops.elu(x, self.alpha) end
function activation.ELU:extra() return ("%g"):format(self.alpha) end

for _, row in ipairs { { "Softmax", "softmax" }, { "LogSoftmax", "log_softmax" } } do
  local name, op = row[1], row[2]
  local class = M.module(name)
  --- nn.Softmax(dim = -1), nn.LogSoftmax(dim = -1)
  function class:init(dim) self.dim = util.check("nn." .. name .. ": dim", dim or -1, "integer") end
  function class:forward(x) return ops[op](x, { dim = self.dim }) end
  function class:extra() return ("%d"):format(self.dim) end
  activation[name] = class
end

activation.Dropout = M.module("Dropout")

--- nn.Dropout(p = 0.5): zeroes elements with probability p while training, divides the rest by 1 - p. The mask
--- depends on (seed, step, global sample, layer, element) alone, not on the number of ranks (Srivastava et al. 2014).
function activation.Dropout:init(p) self.p = util.check("nn.Dropout: p", p == nil and 0.5 or p, "fraction") end
function activation.Dropout:forward(x) return ops.dropout(x, self.p) end
function activation.Dropout:extra() return ("%g"):format(self.p) end

activation.Flatten = M.module("Flatten")

--- nn.Flatten(start = 1, stop = -1): joins these dims.
function activation.Flatten:init(start, stop)
  self.start = util.check("nn.Flatten: start", start or 1, "integer")
  self.stop = util.check("nn.Flatten: stop", stop or -1, "integer")
end
function activation.Flatten:forward(x) return ops.flatten(x, self.start, self.stop) end
function activation.Flatten:extra() return self.start == 1 and "" or ("%d, %d"):format(self.start, self.stop) end

activation.Identity = M.module("Identity")

--- nn.Identity(): returns its input.
function activation.Identity.init() end
function activation.Identity.forward(_, x) return x end
function activation.Identity.extra() return "" end

return activation
