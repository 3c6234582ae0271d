-- Embedding: rows of a table by id.
local init = require "dtrain.nn.initializer"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

local Embedding = M.module("Embedding")

--- nn.Embedding(rows, width, { init =, place = }): ids[...] (0-based) -> [..., width]. weight [rows, width] begins normal(0, 1).
function Embedding:init(rows, width, options)
  util.check("nn.Embedding: rows", rows, "count")
  util.check("nn.Embedding: width", width, "count")
  local o = util.options("nn.Embedding", options, { { "init", "table" }, { "place", "table" } })
  self.rows, self.width = rows, width
  self.weight = parameter.parameter({ rows, width }, o.init or init.normal(0, 1))
  parameter.place(self, o.place)
end

function Embedding:forward(ids) return ops.embedding(ids, self.weight) end
function Embedding:extra() return ("%d, %d"):format(self.rows, self.width) end

return Embedding
