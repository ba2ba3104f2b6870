-- One database and one role per service; neither can enter the other's.
-- Run once, by the postgres image, when its volume is new. The passwords come from the environment.

\getenv order_service_password ORDER_SERVICE_PASSWORD
\getenv payment_service_password PAYMENT_SERVICE_PASSWORD

CREATE ROLE order_service LOGIN PASSWORD :'order_service_password';
CREATE ROLE payment_service LOGIN PASSWORD :'payment_service_password';

CREATE DATABASE orders OWNER order_service;
CREATE DATABASE payments OWNER payment_service;

-- Every role may enter every database unless told otherwise.
REVOKE CONNECT, TEMPORARY ON DATABASE orders, payments, postgres FROM PUBLIC;
