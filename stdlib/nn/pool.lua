-- Pooling over [N, C, H, W].
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local pool = {}

local function show(self)
  local a = self.attrs
  local text = ("{%d, %d}"):format(a.kernel[1], a.kernel[2])
  if a.stride[1] ~= a.kernel[1] or a.stride[2] ~= a.kernel[2] then
    text = text .. (", stride = {%d, %d}"):format(a.stride[1], a.stride[2])
  end
  return text
end

pool.MaxPool2d = M.module("MaxPool2d")

--- nn.MaxPool2d(kernel, { stride = kernel, padding = 0, dilation = 1 }); a number or {h, w} each.
function pool.MaxPool2d:init(kernel, options)
  local o = util.options("nn.MaxPool2d", options,
    { { "stride", "pair" }, { "padding", "pair", 0 }, { "dilation", "pair", 1 } })
  local k = util.pair(util.check("nn.MaxPool2d: kernel", kernel, "pair"))
  self.attrs = { kernel = k, stride = util.pair(o.stride or k), padding = util.pair(o.padding),
    dilation = util.pair(o.dilation) }
end
function pool.MaxPool2d:forward(x) return ops.max_pool2d(x, self.attrs) end
pool.MaxPool2d.extra = show

pool.AvgPool2d = M.module("AvgPool2d")

--- nn.AvgPool2d(kernel, { stride = kernel, padding = 0, count_include_pad = true }).
function pool.AvgPool2d:init(kernel, options)
  local o = util.options("nn.AvgPool2d", options,
    { { "stride", "pair" }, { "padding", "pair", 0 }, { "count_include_pad", "boolean", true } })
  local k = util.pair(util.check("nn.AvgPool2d: kernel", kernel, "pair"))
  self.attrs = { kernel = k, stride = util.pair(o.stride or k), padding = util.pair(o.padding),
    count_include_pad = o.count_include_pad }
end
function pool.AvgPool2d:forward(x) return ops.avg_pool2d(x, self.attrs) end
pool.AvgPool2d.extra = show

pool.AdaptiveAvgPool2d = M.module("AdaptiveAvgPool2d")

--- nn.AdaptiveAvgPool2d(output size, a number or {h, w}).
function pool.AdaptiveAvgPool2d:init(output)
  self.output = util.pair(util.check("nn.AdaptiveAvgPool2d: output", output, "pair"))
end
function pool.AdaptiveAvgPool2d:forward(x) return ops.adaptive_avg_pool2d(x, self.output) end
function pool.AdaptiveAvgPool2d:extra() return ("{%d, %d}"):format(self.output[1], self.output[2]) end

return pool
