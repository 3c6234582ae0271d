-- The nn table: modules, losses, initialisers.
local M = require "dtrain.nn.module"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

local nn = {
  module = M.module,
  is_module = M.is,
  assign = M.assign,
  parameter = parameter.parameter,
  buffer = parameter.buffer,
  init = require "dtrain.nn.initializer",
  Linear = require "dtrain.nn.linear",
  Embedding = require "dtrain.nn.embedding",
  BatchNorm2d = require "dtrain.nn.batch_norm",
  Conv2d = require "dtrain.nn.conv",
  Attention = require "dtrain.nn.attention",
  GPT = require "dtrain.nn.gpt",
  MoE = require "dtrain.nn.moe",
}

for _, name in ipairs { "norm", "pool", "activation", "container", "loss" } do
  for key, value in util.sorted(require("dtrain.nn." .. name)) do nn[key] = value end
end

return util.strict(nn, "nn")
