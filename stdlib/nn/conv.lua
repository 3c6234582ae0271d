-- Conv2d over [N, C, H, W].
local init = require "dtrain.nn.initializer"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

local Conv2d = M.module("Conv2d")

--- nn.Conv2d(inputs, outputs, kernel, { stride = 1, padding = 0, dilation = 1, groups = 1, bias = true, init =,
--- bias_init = }): x[N, inputs, H, W] -> [N, outputs, H', W']; kernel, stride, padding, dilation: a number or {h, w}.
--- weight [outputs, inputs / groups, kh, kw] begins as U(+-1/sqrt(fan in)), as in PyTorch.
function Conv2d:init(inputs, outputs, kernel, options)
  util.check("nn.Conv2d: inputs", inputs, "count")
  util.check("nn.Conv2d: outputs", outputs, "count")
  util.check("nn.Conv2d: kernel", kernel, "pair")
  local o = util.options("nn.Conv2d", options,
    { { "stride", "pair", 1 }, { "padding", "pair", 0 }, { "dilation", "pair", 1 },
    { "groups", "count", 1 }, { "bias", "boolean", true }, { "init", "table" }, { "bias_init", "table" },
      { "place", "table" } })
  if inputs % o.groups ~= 0 or outputs % o.groups ~= 0 then
    util.fail("nn.Conv2d: inputs %d and outputs %d must both divide by groups %d", inputs, outputs, o.groups)
  end
  local k = util.pair(kernel)
  local fan_in = inputs // o.groups * k[1] * k[2]
  self.inputs, self.outputs, self.kernel = inputs, outputs, k
  self.attrs = { stride = util.pair(o.stride), padding = util.pair(o.padding), dilation = util.pair(o.dilation),
    groups = o.groups }
  self.weight = parameter.parameter({ outputs, inputs // o.groups, k[1], k[2] }, o.init or init.default(fan_in))
  if o.bias then self.bias = parameter.parameter({ outputs }, o.bias_init or init.default(fan_in)) end
  parameter.place(self, o.place)
end

function Conv2d:forward(x)
  local bias = self.bias
  if bias then return ops.conv2d(x, self.weight, bias, self.attrs) end
  return ops.conv2d(x, self.weight, self.attrs)
end

function Conv2d:extra()
  local a = self.attrs
  local text = ("%d, %d, {%d, %d}"):format(self.inputs, self.outputs, self.kernel[1], self.kernel[2])
  for _, row in ipairs { { "stride", 1 }, { "padding", 0 }, { "dilation", 1 } } do
    local v = a[row[1]]
    if v[1] ~= row[2] or v[2] ~= row[2] then text = text .. (", %s = {%d, %d}"):format(row[1], v[1], v[2]) end
  end
  if a.groups ~= 1 then text = text .. ", groups = " .. a.groups end
  return text
end

return Conv2d
